"""Bytes that come and go within a step, reckoned from above: gradients on the way, gathered tokens, some logits.

Each is what the engine's own code makes at once, and on a CPU a little less where it works in the cores' caches.
"""

from __future__ import annotations

from engine.plan.holdings import keys_per_rank
from engine.plan.recompute import FP32, Setting

CHUNK_LOGITS = 2**25
"""Most logits that exist at once in the loss, in elements: 64 MiB in bf16."""
PRODUCT = 2**21
"""Elements of the output's gradient that a CPU makes at once."""
ID = 8
CACHED = 2**18
"""Elements in fp32 of a core's cache."""
MASKED_ON_CUDA, MASKED_ON_CPU = 2**26, 2**17
"""Elements of a mask of dropout that are drawn at once."""
CPU_QUERIES = 256
"""Queries whose scores a CPU makes at once, going back."""
OF_A_LABEL = 4 * ID
"""Bytes: weight, loss, place in the vocabulary and the like."""


def alike(rows: int, most: int) -> int:
    """How many to take at a time so that all blocks are alike, and none has more than `most`."""
    blocks = -(-rows // max(1, most))
    return -(-rows // max(1, blocks))


def chunk_of(tokens: int, vocab: int, most: int = CHUNK_LOGITS) -> int:
    """Tokens whose logits exist at once, of so many entries of the vocabulary each."""
    return alike(tokens, most // vocab)


def batches(setting: Setting, *, micro_batches: int) -> int:
    """Bytes of a step's ids, labels and positions, and numbers of documents where rows are packed."""
    rows = micro_batches * setting.micro_batch
    return rows * ID * (setting.seq_len * (4 if setting.packed else 3) + 1)


def reference(setting: Setting) -> int:
    """Bytes that comparing answers takes besides: each token's loss, weight, answer and whether it is right.

    No second model is held. What the first said of each answer is 8 bytes of it.
    """
    return setting.tokens * (ID + ID + FP32 + FP32 + 2)


def logits(setting: Setting, *, trains: bool) -> int:
    """Bytes of a chunk's logits, in the model's precision and in fp32, and of what the output's gradient adds."""
    shape = setting.shape
    share = -(-shape.vocab_size // setting.parallel.tensor)
    chunk = chunk_of(setting.tokens, share) * share
    whole = share * shape.hidden_size
    # On a CPU the product is made some rows at a time, and added in fp32 in the cores' caches.
    product = (
        setting.element * whole if setting.on_cuda else setting.element * min(whole, PRODUCT) + _widened(setting, whole)
    )
    # Once as they are; in fp32 for what becomes of them, and when that is gone, what they add to the weight's gradient.
    passing = max(FP32 * chunk, product * trains)
    return setting.element * chunk + passing + setting.tokens * OF_A_LABEL


def _widened(setting: Setting, elements: int) -> int:
    """Bytes of what a CPU adds to fp32 at once."""
    return 0 if setting.element == FP32 else FP32 * min(elements, CACHED)


def loss_gathered(setting: Setting) -> int:
    """Bytes of all tokens' hidden states and of their gradient where each tensor rank has its own."""
    return 2 * _all_tokens(setting)


def _all_tokens(setting: Setting) -> int:
    if not setting.parallel.sequence or setting.parallel.tensor == 1:
        return 0
    # With several rows they are put in order once they are there.
    return (2 if setting.micro_batch > 1 else 1) * setting.element * setting.tokens * setting.shape.hidden_size


def gathered(setting: Setting, *, backward: bool) -> int:
    """Bytes that other ranks send for one sublayer, tokens or keys; in backward its input and its gradient."""
    return max((2 if backward else 1) * _all_tokens(setting), others_keys(setting))


def others_keys(setting: Setting) -> int:
    """Bytes of the keys and values of all context ranks, for one layer at a time: as they arrive and in the order of
    the row, and so their gradients on the way back.
    """
    if setting.parallel.context == 1:
        return 0
    width = keys_per_rank(setting.shape, tensor=setting.parallel.tensor)
    return setting.element * setting.micro_batch * 4 * setting.seq_len * 2 * width


def making_scores(setting: Setting) -> int:
    """Bytes that are there for a moment besides what is kept.

    Where probabilities are dropped the core makes whole scores: those before and after the mask is added, and in
    backward two gradients. Under ALiBi the bias is made in fp32, before it is rounded.
    """
    shape = setting.shape
    heads = shape.num_heads // setting.parallel.tensor
    core = 2 * setting.element * heads * setting.scores if shape.attention_dropout else 0
    bias = FP32 * heads * setting.scores // setting.micro_batch if shape.family.positions == "alibi" else 0
    return max(core, bias)


def drawing_masks(setting: Setting) -> int:
    """Bytes of the numbers that masks of dropout are made of, as many as are made at once."""
    shape, ranks = setting.shape, setting.parallel.tensor
    elements = [
        bool(shape.attention_dropout) * setting.scores * (shape.num_heads // ranks),
        bool(shape.hidden_dropout) * setting.own_tokens * shape.hidden_size,
    ]
    if setting.lora is not None and setting.lora.dropout:
        elements.append(setting.tokens * max(shape.hidden_size, shape.ffn_hidden_size // ranks))
    # Two buffers of 32 bits, and the mask.
    most = max(elements)
    return 2 * FP32 * min(most, MASKED_ON_CUDA if setting.on_cuda else MASKED_ON_CPU) + most


def forward(setting: Setting) -> int:
    """Bytes of one layer's forward pass that it does not keep."""
    shape = setting.shape
    hidden = setting.own_tokens * shape.hidden_size
    queries = setting.tokens * shape.num_heads * shape.head_dim // setting.parallel.tensor
    whole = setting.tokens * shape.hidden_size
    in_fp32 = (3 if shape.family.norm == "layer" else 1) * FP32 * hidden
    core = making_scores(setting) + drawing_masks(setting)
    return max(in_fp32, 3 * setting.element * queries + core, 2 * setting.element * whole)


def backward(setting: Setting) -> int:
    """Bytes of the backward pass of whatever is at work, beyond what is still saved then.

    The residual's gradient is there throughout. The feed-forward part goes back first, when nothing is freed yet: the
    gradients of down, then the activation's, then those of what it read. Attention follows when all that is.
    """
    shape, element, trains = setting.shape, setting.element, setting.lora is None
    tokens, own_tokens, ranks = setting.tokens, setting.own_tokens, setting.parallel.tensor
    hidden, inner = shape.hidden_size, shape.ffn_hidden_size // ranks
    queries, keys = shape.num_heads * shape.head_dim // ranks, keys_per_rank(shape, tensor=ranks)
    inward = len({"gate", "up"} & set(shape.family.matrices))
    residual, between, whole = element * own_tokens * hidden, element * tokens * inner, element * tokens * hidden
    weight = element * hidden * inner if trains else 0
    attention = element * tokens * (2 * queries + 2 * keys) + (element * hidden * queries if trains else 0)
    freed = inward * between + between + residual
    moments = [
        between + weight + (drawing_masks(setting) if shape.hidden_dropout else 0),
        3 * between,
        inward * (between + weight) + whole - between,
        (5 if shape.family.norm == "layer" else 3) * FP32 * own_tokens * hidden + whole,
        attention + _core(setting) + making_scores(setting) + drawing_masks(setting) - freed,
    ]
    return residual + max(moments)


def _core(setting: Setting) -> int:
    """Bytes of the core's backward pass: copies of keys and values, and the scores of some queries at a time."""
    shape, ranks = setting.shape, setting.parallel.tensor
    heads = shape.num_heads // ranks
    queries = setting.tokens * heads * shape.head_dim
    if setting.on_cuda:
        # Queries' gradient in fp32, keys' and values' for each query head.
        return queries * (FP32 + 2 * setting.element)
    block = 2 * setting.element * setting.micro_batch * heads * setting.seq_len * min(setting.seq_len, CPU_QUERIES)
    width = 2 * setting.micro_batch * setting.seq_len * keys_per_rank(shape, tensor=ranks)
    return 3 * setting.element * queries + block + width * (setting.element + FP32)
