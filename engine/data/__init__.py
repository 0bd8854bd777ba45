"""From files of examples to batches of token ids. Only `format` is for the service; the rest is the trainer's."""
