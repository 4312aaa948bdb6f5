"""muon_groups: which parameters of a model Muon updates, and which AdamW."""

from typing import NamedTuple

from torch import nn

_Named = list[tuple[str, nn.Parameter]]


class MuonGroups(NamedTuple):
    """Named parameters for two optimizers. As a string it is a table with reasons."""

    muon: _Named
    adamw: _Named
    reasons: dict[str, str]

    def __str__(self) -> str:
        rows = [("optimizer", "parameter", "shape", "why")]
        for optimizer, named in (("Muon", self.muon), ("AdamW", self.adamw)):
            for name, p in named:
                rows.append((optimizer, name, "×".join(map(str, p.shape)), self.reasons[name]))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def muon_groups(model: nn.Module) -> MuonGroups:
    """Sort the parameters of ``model``, sharded or not, for one ``Muon`` and one ``AdamW``.

    Muon gets the matrices of hidden layers. AdamW gets embeddings, the output layer, vectors,
    scalars, and tensors of three or more dimensions. An embedding is a weight of ``nn.Embedding``,
    or has "emb" in its name. The output layer is what ``get_output_embeddings()`` returns, or an
    ``nn.Linear`` with as many outputs as an ``nn.Embedding`` has rows.

    Returns:
        Lists of (name, parameter), which optimizers take. ``print`` it to see the reasons.
    """
    modules = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    embeddings = {id(p) for module in modules for p in module.parameters(recurse=False)}
    vocabularies = {module.num_embeddings for module in modules}
    of_output = getattr(model, "get_output_embeddings", lambda: None)()
    heads = [
        m
        for m in model.modules()
        if m is of_output or (isinstance(m, nn.Linear) and m.out_features in vocabularies)
    ]
    outputs = {id(p) for module in heads for p in module.parameters(recurse=False)}
    muon: _Named = []
    adamw: _Named = []
    reasons: dict[str, str] = {}
    for name, p in model.named_parameters():
        hidden = p.dim() == 2 and min(p.shape) > 1
        if id(p) in embeddings or (p.dim() > 1 and "emb" in name.lower()):
            reasons[name] = "embedding"
        elif id(p) in outputs:
            reasons[name] = "output layer"
        elif hidden:
            reasons[name] = "matrix"
        else:
            many = p.dim() > 2 and sum(n > 1 for n in p.shape) > 1
            reasons[name] = f"{p.dim()} dimensions" if many else "vector"
        (muon if reasons[name] == "matrix" else adamw).append((name, p))
    return MuonGroups(muon, adamw, reasons)
