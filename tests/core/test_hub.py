"""What is asked of a hub and how, against one of our own that Hugging Face's own library downloads from, too."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest

from core import downloads, hub
from core.errors import InvalidModel
from core.hub import Hub, Refused, Wanted
from core.reach import UnreachableError
from engine.inventory import INDEX
from tests.core.test_catalog import CONFIG, WHOLE
from tests.fakes.hub import COMMIT, FakeHub
from tests.fakes.hub import hub as hub_of
from tests.fakes.receiver import Receiver, receiving
from tests.make import tokenizer, weights

HERE = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
WEIGHTS = "model.safetensors"
FILES = {
    "config.json": json.dumps(CONFIG).encode(), "tokenizer.json": tokenizer(260), WEIGHTS: weights(WHOLE),
    "README.md": b"# Tiny", "modeling_tiny.py": b"print()", "pytorch_model.bin": b"\x80\x04.", "onnx/model.onnx": b"0",
    "chat_template.jinja": b"{{ messages }}", "merges.txt": b"a b",
}  # fmt: skip
WANTED = Wanted("org/tiny", "main")
GIB = 2**30


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    with hub_of("org/tiny", FILES, large=frozenset({WEIGHTS})) as fake:
        yield fake


def look(fake: FakeHub, wanted: Wanted = WANTED, most_bytes: int = GIB) -> downloads.Found:
    return downloads.look(Hub(fake.url), wanted, most_bytes=most_bytes)


def test_hugging_faces_own_library_gets_from_the_twin_what_we_get(fake: FakeHub, tmp_path: Path) -> None:
    from huggingface_hub import HfApi, snapshot_download

    # It takes a redirect within the host for a repository that moved, so large files are elsewhere for it.
    fake.location = fake.url.replace("127.0.0.1", "localhost") + f"/cdn/{WEIGHTS}"
    theirs = snapshot_download("org/tiny", revision="v1.0", endpoint=fake.url, local_dir=tmp_path)
    fake.location = None
    ours = Hub(fake.url)
    repo = ours.repo(Wanted("org/tiny", "v1.0"))
    said = HfApi(endpoint=fake.url).model_info("org/tiny", revision="v1.0", files_metadata=True)
    assert repo.commit == said.sha
    assert {file.path: file.bytes for file in repo.files} == {each.rfilename: each.size for each in said.siblings or ()}
    for file in repo.files:
        check = downloads.Check(file)
        content = ours.read(repo, file)
        check.update(content)
        assert check.is_right
        assert content == (Path(theirs) / file.path).read_bytes()


def test_what_makes_a_base_is_wanted_and_nothing_else(fake: FakeHub) -> None:
    found = look(fake)
    names = {"config.json", "tokenizer.json", "chat_template.jinja", "merges.txt", WEIGHTS}
    assert {file.path for file in found.files} == names
    assert found.bytes == sum(len(FILES[name]) for name in names)
    assert (found.repo.source, found.shape.hidden_size) == (f"hf://org/tiny@{COMMIT}", 16)
    assert not fake.of(WEIGHTS)


def test_an_index_says_which_weights_are_wanted(fake: FakeHub) -> None:
    fake.files |= {"a.safetensors": b"0", "b.safetensors": b"0"}
    fake.files[INDEX] = json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}).encode()
    wanted = {file.path for file in look(fake).files if file.path.endswith(".safetensors")}
    assert wanted == {"a.safetensors", "b.safetensors"}


def test_a_name_that_no_disk_takes_while_it_comes_is_refused(fake: FakeHub) -> None:
    """255 bytes are a name's limit on Linux, and a file has a sign before its name and five behind it on its way."""
    longest = "w" * (255 - len(".") - len(".part") - len(".safetensors")) + ".safetensors"
    for name in (longest, f"w{longest}"):
        fake.files |= {name: b"0", INDEX: json.dumps({"weight_map": {"x": name}}).encode()}
        if name == longest:
            assert longest in {file.path for file in look(fake).files}
            continue
        with pytest.raises(InvalidModel, match="a name of 250 characters, and the disk takes 249"):
            look(fake)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        pytest.param({WEIGHTS: None}, "pytorch_model.bin and not as safetensors", id="pickles alone"),
        pytest.param({WEIGHTS: None, "pytorch_model.bin": None}, "neither model.safetensors nor", id="no weights"),
        pytest.param({"config.json": None}, "has no config.json", id="no config"),
        pytest.param({"tokenizer.json": None}, "has no tokenizer.json", id="no tokenizer"),
        pytest.param({"config.json": b"{"}, "config.json is no JSON", id="a damaged config"),
        pytest.param({"config.json": b'{"model_type": "mamba"}'}, "model_type 'mamba' is not supported", id="a family"),
        pytest.param({INDEX: b"{}"}, "index.json is damaged", id="an index without a map"),
        pytest.param({INDEX: b'{"weight_map": {"x": "../../x.safetensors"}}'}, "no such", id="an index that leaves"),
        pytest.param({INDEX: b'{"weight_map": {"x": "pytorch_model.bin"}}'}, "no such file", id="an index of pickles"),
    ],
)  # fmt: skip
def test_what_would_be_of_no_use_is_refused_before_its_weights_are_fetched(
    fake: FakeHub, files: dict[str, bytes | None], words: str
) -> None:
    fake.files = {name: content for name, content in (fake.files | files).items() if content is not None}
    with pytest.raises(InvalidModel, match=words):
        look(fake)
    assert not fake.of(WEIGHTS + "?")
    assert not fake.of("/cdn/")


def test_what_is_larger_than_the_operator_wants_is_refused_by_its_size(fake: FakeHub) -> None:
    with pytest.raises(InvalidModel, match="TRAINSHED_MAX_MODEL_BYTES"):
        look(fake, most_bytes=1000)


def test_nothing_at_that_name_or_revision_is_told(fake: FakeHub) -> None:
    for wanted in (Wanted("org/other", "main"), Wanted("org/tiny", "v2")):
        with pytest.raises(Refused, match="has no hf://"):
            look(fake, wanted)


@pytest.mark.parametrize(
    "source",
    ["hf://org/name", "hf://org/name@main", "hf://a/b.c@refs/pr/1", "hf://HuggingFaceTB/SmolLM2-135M@v1.0", "hf://o/n@1"],
)  # fmt: skip
def test_a_source_names_a_repository_and_a_revision(source: str) -> None:
    wanted = Wanted.parse(source)
    assert source in {f"hf://{wanted.name}", f"hf://{wanted.name}@{wanted.revision}"}


@pytest.mark.parametrize(
    "source",
    [
        "hf://", "hf://name", "hf://org/", "hf:///name", "hf://org/name/file", "hf://org/name@", "hf://org/name@..",
        "hf://org/../name", "hf://../name", "hf://org/name@a/../../b", "hf://org/name@a//b", "hf://org/na me",
        "hf://org/name?x", "hf://org/name#x", "hf://org/name@a?b", "hf://127.0.0.1:80/x", "hf://user@host/name",
        "hf://org/name@a\n", "hf://org/name@%2e%2e", "hf://org/-name", "hf://org/a--b", "hf://org/" + "x" * 97,
        "hf://org/n\u00e4me", "https://huggingface.co/org/name", "hf://org/name@\\\\host",
    ],
)  # fmt: skip
def test_nothing_else_is_a_source(source: str) -> None:
    with pytest.raises(ValueError, match="hf://org/name"):
        Wanted.parse(source)


def test_the_token_goes_to_the_hub(fake: FakeHub) -> None:
    fake.token = "hf_secret"
    with pytest.raises(Refused, match="HF_TOKEN") as refused:
        look(fake)
    assert "hf_secret" not in str(refused.value)
    assert downloads.look(Hub(fake.url, token="hf_secret"), WANTED, most_bytes=GIB).repo.commit == COMMIT


@pytest.fixture
def elsewhere(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Another host, under TLS, that a hub may lead to."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    monkeypatch.setattr(hub, "ssl_context", lambda: ssl.create_default_context(cafile=str(certificate)))
    with receiving(context) as elsewhere:
        yield elsewhere


def test_the_token_does_not_go_along_to_where_the_hub_redirects(fake: FakeHub, elsewhere: Receiver) -> None:
    fake.token, fake.location = "hf_secret", elsewhere.url + "?signature=1"
    with (
        pytest.raises(UnreachableError, match="where it leads, answered 204"),
        Hub(fake.url, token="hf_secret", networks=HERE).opened("org/tiny", COMMIT, WEIGHTS, start=5, seconds=10),
    ):
        pass
    message = elsewhere.next()
    assert (message.path, message.headers["range"]) == ("/hook?signature=1", "bytes=5-")
    assert "hf_secret" not in str(message.headers)
    assert fake.of("/resolve/")[0].headers["authorization"] == "Bearer hf_secret"


@pytest.mark.parametrize(
    ("location", "words"),
    [
        pytest.param("http://example.com/x?signature=secret", "not https", id="without TLS"),
        pytest.param("http://127.0.0.1:1/x", "not https", id="another port of its host, without TLS"),
        pytest.param("ftp://example.com/x", "not https", id="another scheme"),
        pytest.param("file:///etc/passwd", "no URL", id="a file"),
        pytest.param("https://user:secret@example.com/", "no URL", id="with a password"),
        pytest.param("https://exämple.com/", "no URL", id="no ASCII"),
        pytest.param("https://[", "no URL", id="half an address"),
    ],
)
def test_a_redirect_leads_to_https_alone(fake: FakeHub, location: str, words: str) -> None:
    fake.location = location.encode().decode("latin-1")
    with (
        pytest.raises(Refused, match=words) as refused,
        Hub(fake.url).opened("org/tiny", COMMIT, WEIGHTS, start=0, seconds=10),
    ):
        pass
    assert "secret" not in str(refused.value)


def test_a_redirect_without_end_ends(fake: FakeHub) -> None:
    fake.location = f"{fake.url}/org/tiny/resolve/{COMMIT}/{WEIGHTS}"
    with (
        pytest.raises(Refused, match=r"more than 5 times; look whether HF_ENDPOINT is right"),
        Hub(fake.url).opened("org/tiny", COMMIT, WEIGHTS, start=0, seconds=10),
    ):
        pass


@pytest.mark.parametrize(
    ("status", "location", "words"),
    [
        pytest.param(401, None, "answered 401", id="a signature that it does not know"),
        pytest.param(403, None, "answered 403", id="one that ran out"),
        pytest.param(404, None, "answered 404", id="nothing there"),
        pytest.param(416, None, "answered 416", id="no part, though none was asked for"),
        pytest.param(503, None, "answered 503", id="an outage"),
        pytest.param(302, "http://example.com/x?signature=secret", "redirects to http://example.com, which", id="http"),
        pytest.param(302, "https://[", "redirects to what is no URL", id="no URL"),
        pytest.param(302, "/hook", "redirects more than 5 times", id="without end"),
    ],
)
def test_what_goes_wrong_where_the_hub_leads_may_be_over_next_time(
    fake: FakeHub, elsewhere: Receiver, status: int, location: str | None, words: str
) -> None:
    """The hub leads elsewhere then, or by another signature."""
    fake.location, elsewhere.location, elsewhere.answers = elsewhere.url, location, [status] * 9
    with (
        pytest.raises(UnreachableError, match=words) as told,
        Hub(fake.url, networks=HERE).opened("org/tiny", COMMIT, WEIGHTS, start=0, seconds=10),
    ):
        pass
    assert "secret" not in str(told.value)


def test_a_hub_that_is_away_or_busy_may_be_asked_again(fake: FakeHub) -> None:
    fake.answers = [503]
    with pytest.raises(UnreachableError, match="503"):
        look(fake)
    with pytest.raises(UnreachableError, match="refused"):
        Hub("http://127.0.0.1:1").repo(WANTED)


def test_a_page_of_whoever_stands_between_is_no_word_of_the_hub_and_no_damage(fake: FakeHub) -> None:
    """A proxy that wants a sign-in first answers 200 with its page, whatever is asked for."""
    fake.pages = 1
    with pytest.raises(UnreachableError, match="a web page where hf://org/tiny@main should be: a proxy"):
        look(fake)
    assert look(fake).repo.commit == COMMIT


def test_what_is_no_hub_is_told_with_the_setting(fake: FakeHub) -> None:
    fake.commit = "main"
    with pytest.raises(Refused, match="no commit"):
        look(fake)
    fake.described = lambda: {"sha": COMMIT}  # type: ignore[method-assign]
    with pytest.raises(Refused, match="HF_ENDPOINT"):
        look(fake)
