"""Named to an SGLang server by its flag `--custom-weight-loader`: takes a version from a PolyRL worker.

Runs in the server's environment; see `taking`. SGLang calls it for /update_weights_from_tensor with the tensors of the
request, of which we send none: where the worker listens is in the environment that the server was started with.
"""

import logging
import os
from typing import Any

from polyrl.engines.served.between import SOCKET_VARIABLE
from polyrl.engines.served.taking import Rank, take


def load(model: Any, named_tensors: object) -> None:
    try:
        rank = _rank()
    except (ImportError, AttributeError):  # another SGLang than ours; what is raised here ends the server
        logging.getLogger(__name__).exception("no weights are taken: this SGLang does not say which rank this is")
        return
    take(os.environ.get(SOCKET_VARIABLE, ""), rank, model, model.load_weights)


def _rank() -> Rank:
    import torch.distributed
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    here: Any = get_parallel()
    return Rank(torch.distributed.get_rank(), torch.distributed.get_world_size(), here.tp_rank, here.tp_size)
