"""The builtin engine: any standard Hugging Face causal language model, with no inference server."""

import logging

for _name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao where it finds one, and that warns
    logging.getLogger(_name).setLevel(logging.ERROR)
