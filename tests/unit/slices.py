"""A small model, cut as a server's ranks have it, and their way to load weights."""

import torch

from polyrl.engines.served.inside import Rank


class Model(torch.nn.Module):
    """A slice of a model: its table's rows are split, its vector is whole."""

    def __init__(self, num_slices: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(64 // num_slices, 8, dtype=dtype)
        self.norm = torch.nn.Linear(8, 1, bias=False, dtype=dtype)
        self.norm.weight = torch.nn.Parameter(torch.zeros(8, dtype=dtype))


def state(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"embed_tokens.weight": torch.randn(64, 8), "norm.weight": torch.randn(8)}


def loader(model: Model, rank: Rank, *, wrong: bool = False, fails: bool = False, keep: list | None = None):
    def load(tensors) -> None:
        rows = 64 // rank.num_slices
        for name, tensor in tensors:
            if keep is not None:
                keep.append(tensor)
            if fails:
                raise RuntimeError("no memory\nis left")
            own = tensor[rank.slice * rows :][:rows] if name == "embed_tokens.weight" else tensor
            with torch.no_grad():
                model.get_parameter(name).copy_(own + 1 if wrong and name == "norm.weight" else own)

    return load
