"""units.cut_by_module: whose parameters are gathered together, and what stays with the root."""

from collections import Counter

import pytest
import torch
from harness import MLP, ManyLayers, Tied
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zero_ext.engine.plan import kinds_of, units_of_blocks
from zero_ext.engine.units import (
    Block,
    Tree,
    UnitPlan,
    bytes_of,
    cut_by_module,
    largest_of_many,
    parts,
)

SEPARATE = 1e-6  # bytes: nothing is merged
EVERYTHING = 1e9


def linear() -> nn.Linear:
    return nn.Linear(2, 3)  # 9 elements, 36 bytes


def named(root: nn.Module, units=None, bucket_bytes: float = SEPARATE, **kwargs) -> list[tuple]:
    """(module names, parameter names) of every block; the root's name is ""."""
    modules = {id(m): n for n, m in root.named_modules()}
    names = [n for n, _ in root.named_parameters()]
    blocks = cut_by_module(Tree(root), list(root.parameters()), units, bucket_bytes, **kwargs)
    assert [b.root for b in blocks] == [False] * (len(blocks) - 1) + [True]
    return [([modules[id(m)] for m in b.modules], [names[i] for i in b.members]) for b in blocks]


def modules_of(root: nn.Module, units=None, bucket_bytes: float = SEPARATE) -> list[list[str]]:
    return [modules for modules, _ in named(root, units, bucket_bytes)]


def both(name: str) -> list[str]:
    return [f"{name}.weight", f"{name}.bias"]


class Model(nn.Module):
    """Modules by name, in the order given; never run."""

    def __init__(self, **modules: nn.Module):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self):
        raise AssertionError


# The default


def test_children_of_lists_and_sequentials_are_units_in_backward_order():
    model = Model(
        first=linear(),
        blocks=nn.ModuleList([linear(), linear()]),
        tail=nn.Sequential(linear(), nn.ReLU(), linear()),
    )
    assert named(model) == [
        (["tail.2"], both("tail.2")),
        (["tail.0"], both("tail.0")),
        (["blocks.1"], both("blocks.1")),
        (["blocks.0"], both("blocks.0")),
        ([""], both("first")),
    ]


def test_a_model_without_containers_is_one_block():
    assert named(Model(a=linear(), b=linear())) == [([""], [*both("a"), *both("b")])]


def test_a_container_of_one_is_looked_into():
    model = Model(only=nn.Sequential(Model(inner=nn.ModuleList([linear(), linear()]))))
    assert modules_of(model) == [["only.0.inner.1"], ["only.0.inner.0"], [""]]
    assert modules_of(Model(only=nn.ModuleList([linear()]))) == [[""]]


def test_the_outermost_container_decides():
    inner = [nn.Sequential(linear(), linear()), Model(layers=nn.ModuleList([linear(), linear()]))]
    model = Model(blocks=nn.ModuleList(inner))
    assert modules_of(model) == [["blocks.1"], ["blocks.0"], [""]]


def test_lists_in_a_list_are_never_called_themselves():
    stages = nn.ModuleList(nn.ModuleList([linear(), linear()]) for _ in range(2))
    assert modules_of(Model(stages=stages)) == [
        *(["stages.1.1"], ["stages.1.0"], ["stages.0.1"], ["stages.0.0"]),
        [""],
    ]


def test_a_dictionary_is_looked_into_and_none_itself():
    parts = nn.ModuleDict({"trunk": nn.Sequential(linear(), linear()), "head": linear()})
    assert modules_of(Model(parts=parts)) == [["parts.trunk.1"], ["parts.trunk.0"], [""]]
    in_a_list = nn.ModuleList([nn.ModuleDict({"a": linear()}), linear()])
    assert named(Model(blocks=in_a_list)) == [
        (["blocks.1"], both("blocks.1")),
        (["blocks.0.a"], both("blocks.0.a")),
        ([""], []),
    ]


class Holder(nn.Module):
    """Without a forward: its parts are called one by one."""

    def __init__(self, **modules: nn.Module):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


class ListWithForward(nn.ModuleList):
    def forward(self):
        raise AssertionError


@pytest.mark.parametrize(
    "make", [lambda **parts: nn.ModuleDict(parts), lambda **parts: Holder(**parts)]
)
def test_what_is_called_in_one_child_of_a_list_is_one_unit(make):
    children = [make(a=linear(), act=nn.ReLU(), b=linear()) for _ in range(3)]
    model = Model(blocks=nn.ModuleList(children), head=linear())
    assert named(model) == [
        *(
            ([f"blocks.{k}.a", f"blocks.{k}.b"], [*both(f"blocks.{k}.a"), *both(f"blocks.{k}.b")])
            for k in (2, 1, 0)
        ),
        ([""], both("head")),
    ]
    two = 4 * 36  # bytes
    assert len(modules_of(model, bucket_bytes=two)) == 3  # merged as other neighbours are


def test_a_list_of_one_dictionary_is_looked_into():
    model = Model(only=nn.ModuleList([nn.ModuleDict({"a": linear(), "b": linear()})]))
    assert modules_of(model) == [["only.0.a", "only.0.b"], [""]]


def test_dictionaries_of_lists_of_dictionaries():
    def inner():
        return nn.ModuleDict({"x": nn.ModuleList([linear(), linear()]), "y": linear()})

    model = Model(blocks=nn.ModuleList([inner(), inner()]))
    assert modules_of(model) == [
        ["blocks.1.y"],
        ["blocks.1.x.1"],
        ["blocks.1.x.0"],
        ["blocks.0.y"],
        ["blocks.0.x.1"],
        ["blocks.0.x.0"],
        [""],
    ]


def test_a_list_with_a_forward_is_called_itself():
    model = Model(blocks=nn.ModuleList([ListWithForward([linear(), linear()]), linear()]))
    assert modules_of(model) == [["blocks.1"], ["blocks.0"], [""]]


@pytest.mark.parametrize(
    "model, share",
    [
        (Model(a=linear(), b=linear()), 1.0),  # the root has all of it
        (Model(blocks=nn.ModuleList([linear(), linear()])), None),
        (nn.Linear(7, 13), None),  # one module cannot be cut
        (
            Model(
                big=nn.Sequential(Model(x=nn.Linear(50, 50), y=linear()), linear()), small=linear()
            ),
            2559 / 2577,
        ),
    ],
)
def test_a_unit_with_most_of_the_parameters_is_found(model, share):
    parameters = list(model.parameters())
    tree = Tree(model)
    blocks = cut_by_module(tree, parameters, None, SEPARATE)
    found = largest_of_many(blocks, tree, parameters, bytes_of(parameters, None))
    if share is None:
        assert found is None
    else:
        assert found is not None and found[1] == share


def test_models_in_a_root_without_a_forward_are_units_themselves():
    """They are called instead of it, and what the root keeps would never be gathered."""
    trunk = Model(stem=linear(), blocks=nn.ModuleList([linear(), linear()]))
    model = nn.ModuleDict({"trunk": trunk, "heads": nn.ModuleDict({"a": linear()})})
    expected = [
        (["heads.a"], both("heads.a")),
        (["trunk.blocks.1"], both("trunk.blocks.1")),
        (["trunk.blocks.0"], both("trunk.blocks.0")),
        (["trunk"], both("trunk.stem")),
        ([""], []),
    ]
    assert named(model) == expected
    assert named(model, bucket_bytes=EVERYTHING)[-1] == ([""], [])
    assert modules_of(nn.ModuleList([linear(), linear()]), bucket_bytes=EVERYTHING) == [
        ["0", "1"],
        [""],
    ]


def test_what_models_share_is_gathered_for_each_of_them():
    shared = linear()
    model = nn.ModuleDict({"a": Model(x=shared, y=linear()), "b": Model(x=shared), "c": linear()})
    assert named(model) == [
        (["c"], both("c")),
        (["a"], both("a.y")),
        (["a", "b"], both("a.x")),
        ([""], []),
    ]


def test_what_units_leave_out_goes_with_the_models_of_a_root_without_a_forward():
    models = [Model(stem=linear(), norm=nn.LayerNorm(2), head=linear()) for _ in range(2)]
    model = nn.ModuleList(models)
    model.append(Model(tied=models[0].head))
    assert named(model, nn.LayerNorm) == [
        (["1.norm"], both("1.norm")),
        (["0.norm"], both("0.norm")),
        (["1"], [*both("1.stem"), *both("1.head")]),
        (["0", "2"], both("0.head")),
        (["0"], both("0.stem")),
        ([""], []),
    ]
    only = nn.ParameterList([nn.Parameter(torch.zeros(2))])
    assert named(nn.ModuleList([only, linear()])) == [(["1"], both("1")), ([""], ["0.0"])]


# units=


def test_units_by_class():
    model = ManyLayers(blocks=3, width=2)
    names = [["blocks.2"], ["blocks.1"], ["blocks.0"], [""]]
    assert modules_of(model, ManyLayers.Block) == names
    for collection in (tuple, list, set):
        assert modules_of(model, collection([ManyLayers.Block, nn.Conv2d])) == names


def test_a_parameter_belongs_to_the_innermost_unit():
    model = ManyLayers(blocks=1, width=2)
    assert named(model, (ManyLayers.Block, nn.Linear)) == [
        (["blocks.0.linear"], both("blocks.0.linear")),
        (["blocks.0"], ["blocks.0.gain"]),
        ([""], []),
    ]


def test_units_by_name_and_module():
    seen = []

    def choose(name, module):
        seen.append((name, module))
        return name == "layers.1"

    model = MLP()
    assert modules_of(model, choose) == [["layers.1"], [""]]
    assert seen == [(n, m) for n, m in model.named_modules() if n]


@pytest.mark.parametrize("units", [nn.Conv2d, (nn.Conv2d, nn.RNN), lambda name, module: False])
def test_units_that_choose_nothing_are_refused_with_what_there_is(units):
    with pytest.raises(ValueError, match=r"chooses no module of MLP; it has .*Linear, MLP, Module"):
        modules_of(MLP(), units)


@pytest.mark.parametrize("units", [int, (nn.Linear, int), [nn.Linear, "Linear"]])
def test_classes_that_are_no_modules_are_refused(units):
    with pytest.raises(TypeError, match="zero_ext: units holds"):
        modules_of(MLP(), units)


@pytest.mark.parametrize("units", [3, "Linear"])
def test_other_kinds_of_choice_are_refused(units):
    with pytest.raises(TypeError, match=r"units is .* Pass module classes, .* or a function of"):
        modules_of(MLP(), units)


def test_modules_with_one_string_are_one_unit_wherever_they_are():
    """Also a weight that they share; the others are merged around them."""
    model = Model(embed=nn.Embedding(3, 2), a=linear(), b=linear(), norm=linear(), head=linear())
    model.head.weight = model.embed.weight

    def choose(name: str, module: nn.Module) -> bool | str:
        return "ends" if name in ("embed", "norm", "head") else True

    ends = ["embed.weight", *both("norm"), "head.bias"]
    blocks = [(["a", "b"], [*both("a"), *both("b")]), (["embed", "norm", "head"], ends), ([""], [])]
    assert named(model, choose, EVERYTHING) == blocks
    halves = lambda name, module: {"a": "a", "b": "b"}.get(name, False)  # noqa: E731
    assert modules_of(model, halves, EVERYTHING) == [["b"], ["a"], [""]]


def test_no_classes_make_one_unit():
    assert modules_of(ManyLayers(blocks=3, width=2), ()) == [[""]]


def nearly_all(model: nn.Module) -> int:
    """A bucket that holds everything but one element."""
    return sum(p.numel() * p.element_size() for p in model.parameters()) - 1


# Shared parameters


def test_a_parameter_of_two_units_goes_with_the_root():
    layers = nn.ModuleList(linear() for _ in range(3))
    layers[2].weight = layers[0].weight
    model = Model(layers=layers)
    assert named(model, bucket_bytes=nearly_all(model)) == [
        (
            ["layers.0", "layers.1", "layers.2"],
            ["layers.0.bias", *both("layers.1"), "layers.2.bias"],
        ),
        ([""], ["layers.0.weight"]),
    ]


def test_a_parameter_of_the_root_and_a_unit_goes_with_the_root():
    model = Tied()
    assert named(model, nn.Linear) == [(["middle"], both("middle")), ([""], ["embedding.weight"])]


def test_a_parameter_that_is_shared_within_a_unit_stays_there():
    units = nn.ModuleList(Model(a=linear(), b=linear()) for _ in range(2))
    units[0].b.weight = units[0].a.weight
    assert named(Model(units=units))[1] == (
        ["units.0"],
        ["units.0.a.weight", "units.0.a.bias", "units.0.b.bias"],
    )


def test_a_module_in_two_places_is_one_unit():
    twice = linear()
    model = Model(a=nn.ModuleList([twice, linear()]), b=nn.ModuleList([linear(), twice]))
    for bucket_bytes in (SEPARATE, nearly_all(model)):
        blocks = cut_by_module(Tree(model), list(model.parameters()), None, bucket_bytes)
        assert sum(twice in block.modules for block in blocks) == 1
        assert all(block.members == sorted(block.members) for block in blocks)


# Merging


def test_neighbours_are_merged_up_to_the_bucket_size():
    model = Model(layers=nn.ModuleList(linear() for _ in range(5)))
    assert modules_of(model, bucket_bytes=2 * 36) == [
        ["layers.4"],
        ["layers.2", "layers.3"],
        ["layers.0", "layers.1"],
        [""],
    ]
    assert modules_of(model, bucket_bytes=2 * 36 - 1) == [
        [f"layers.{i}"] for i in (4, 3, 2, 1, 0)
    ] + [[""]]


def test_merged_blocks_are_of_about_the_same_size():
    """Seven with room for five are four and three; a large one between them stays alone."""
    model = Model(layers=nn.ModuleList(linear() for _ in range(7)))
    assert modules_of(model, bucket_bytes=5 * 36) == [
        ["layers.4", "layers.5", "layers.6"],
        ["layers.0", "layers.1", "layers.2", "layers.3"],
        [""],
    ]
    model.layers[2] = nn.Linear(10, 30)
    assert modules_of(model, bucket_bytes=5 * 36) == [
        ["layers.3", "layers.4", "layers.5", "layers.6"],
        ["layers.2"],
        ["layers.0", "layers.1"],
        [""],
    ]


def test_sizes_are_those_of_the_dtype_that_is_computed_in():
    model = Model(layers=nn.ModuleList(linear() for _ in range(4)), rest=linear())
    parameters = list(model.parameters())
    halves = [torch.bfloat16] * len(parameters)
    blocks = cut_by_module(Tree(model), parameters, None, 2 * 36, halves)
    assert [len(block.modules) for block in blocks] == [4, 1]


def test_no_merging_across_containers():
    model = Model(a=nn.ModuleList([linear(), linear()]), b=nn.ModuleList([linear(), linear()]))
    assert modules_of(model, bucket_bytes=nearly_all(model)) == [
        ["b.0", "b.1"],
        ["a.0", "a.1"],
        [""],
    ]


def test_no_merging_over_a_sibling_that_is_in_no_unit():
    """It would be gathered before, and kept until after, everything that lies between."""
    model = Model(a=linear(), b=nn.LayerNorm(3), c=linear(), d=nn.ReLU(), e=linear())
    assert modules_of(model, nn.Linear, EVERYTHING) == [["c", "e"], ["a"], [""]]


def test_children_of_a_sequential_are_entered_themselves():
    """They may be called one by one, or through a slice of it."""
    model = Model(
        a=nn.Sequential(linear(), nn.ReLU(), linear()), b=nn.ModuleList([linear(), linear()])
    )
    assert named(model, bucket_bytes=nearly_all(model)) == [
        (["b.0", "b.1"], [*both("b.0"), *both("b.1")]),
        (["a.0", "a.2"], [*both("a.0"), *both("a.2")]),
        ([""], []),
    ]


def test_what_lies_behind_the_blocks_is_completed_first():
    blocks = [Block([], [4, 5]), Block([], [1, 2, 3]), Block([], [0, 6, 7], root=True)]
    assert parts(blocks) == [(2, [6, 7]), (0, [4, 5]), (1, [1, 2, 3]), (2, [0])]
    assert parts([Block([], [0, 1], root=True)]) == [(0, [0, 1])]
    assert parts([Block([], [0, 1]), Block([], [], root=True)]) == [(0, [0, 1])]


def test_a_model_that_fits_one_bucket_is_one_unit():
    model = Model(a=nn.ModuleList([linear(), linear()]), b=linear())
    assert modules_of(model, bucket_bytes=EVERYTHING) == [[""]]
    assert modules_of(model, bucket_bytes=nearly_all(model)) == [["a.0", "a.1"], [""]]
    assert modules_of(model, nn.Linear, EVERYTHING) != [[""]]  # what was asked for


@pytest.mark.parametrize("bucket_mb", [1, 25])
def test_1083_small_parameters_are_a_handful_of_blocks(bucket_mb):
    model = ManyLayers()
    blocks = cut_by_module(Tree(model), list(model.parameters()), None, bucket_mb * 2**20)
    size = sum(p.numel() * 4 for p in model.parameters())
    assert len(blocks) - 1 == (-(-size // 2**20) if bucket_mb == 1 else 0)
    assert len(blocks) <= 8


# What holds for every model


@st.composite
def trees(draw, depth: int = 3) -> nn.Module:
    kind = draw(st.sampled_from(["leaf", "plain", "list", "sequential", "dict", "nothing"]))
    if kind == "leaf" or depth == 0:
        return nn.Linear(draw(st.integers(1, 3)), draw(st.integers(1, 3)), bias=draw(st.booleans()))
    if kind == "nothing":
        return nn.ReLU()
    children = draw(st.lists(trees(depth=depth - 1), max_size=4))
    if kind == "plain":
        module = Model(**{f"m{i}": child for i, child in enumerate(children)})
        module.own = nn.Parameter(torch.zeros(draw(st.integers(0, 3))))
        return module
    if kind == "dict":
        return nn.ModuleDict({f"k{i}": child for i, child in enumerate(children)})
    return nn.ModuleList(children) if kind == "list" else nn.Sequential(*children)


@st.composite
def models(draw) -> nn.Module:
    """Some parameters tied, some modules in several places."""
    children = draw(st.lists(trees(), min_size=1, max_size=3))
    model = Model(**{f"m{i}": child for i, child in enumerate(children)})
    leaves = [m for m in model.modules() if isinstance(m, nn.Linear)]
    for _ in range(draw(st.integers(0, 2)) if len(leaves) > 1 else 0):
        a, b = draw(st.sampled_from(leaves)), draw(st.sampled_from(leaves))
        a.weight = b.weight
    containers = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    if containers and leaves and draw(st.booleans()):
        draw(st.sampled_from(containers)).append(draw(st.sampled_from(leaves)))
    return model


merged = st.sampled_from(
    [None, nn.Module, (nn.Linear, nn.Sequential), lambda name, module: name.count(".") == 1]
)
choices = merged | st.just(
    lambda name, module: "all linear ones" if isinstance(module, nn.Linear) else "." in name
)
sizes = st.sampled_from([SEPARATE, 40, 100, EVERYTHING])


def cut_any(model, choice, bucket_bytes):
    try:
        return cut_by_module(Tree(model), list(model.parameters()), choice, bucket_bytes)
    except ValueError:  # nothing is chosen
        return cut_by_module(Tree(model), list(model.parameters()), None, bucket_bytes)


@given(models(), choices, sizes)
def test_every_parameter_is_in_exactly_one_block(model, choice, bucket_bytes):
    blocks = cut_any(model, choice, bucket_bytes)
    count = Counter(i for block in blocks for i in block.members)
    assert count == Counter(range(len(list(model.parameters()))))
    assert all(block.members or block.root for block in blocks)
    assert all(block.members == sorted(block.members) for block in blocks)


@given(models(), choices, sizes)
def test_whatever_uses_a_parameter_is_inside_its_block(model, choice, bucket_bytes):
    """Else it would be read while it is released."""
    parameters = list(model.parameters())
    for block in cut_any(model, choice, bucket_bytes):
        inside = {id(m) for module in block.modules for m in module.modules()}
        for i in block.members:
            users = [
                m
                for m in model.modules()
                if any(p is parameters[i] for p in m._parameters.values())
            ]
            assert users and all(id(m) in inside for m in users)


@given(models(), choices, sizes)
def test_no_module_is_entered_for_two_blocks(model, choice, bucket_bytes):
    blocks = cut_any(model, choice, bucket_bytes)
    count = Counter(id(module) for block in blocks for module in block.modules)
    assert set(count.values()) <= {1}
    assert blocks[-1].modules == [model] and blocks[-1].root


@given(models(), merged, sizes)
def test_only_a_single_module_makes_a_block_too_large(model, choice, bucket_bytes):
    """Or a dictionary, what is called in which is gathered together."""
    parameters = list(model.parameters())
    dictionaries = [m for m in model.modules() if isinstance(m, nn.ModuleDict)]
    for block in cut_any(model, choice, bucket_bytes)[:-1]:
        held = sum(parameters[i].numel() * 4 for i in block.members)
        owners = [m for m in block.modules for p in m.parameters() if p.numel()]
        ids = {id(m) for m in owners}
        in_one = any(ids <= {id(m) for m in each.modules()} for each in dictionaries)
        assert held <= bucket_bytes or len(ids) == 1 or in_one


# Units of one block


def test_a_block_is_split_by_dtype_and_by_what_is_frozen():
    f32, bf16 = torch.float32, torch.bfloat16
    kinds = [(f32, True), (f32, False), (bf16, True), (f32, True), (bf16, False), (f32, False)]
    parameters = [
        nn.Parameter(torch.zeros(1, dtype=dtype), requires_grad=trainable)
        for dtype, trainable in kinds
    ]
    named = kinds_of(dict(enumerate(parameters)))

    def split(members):
        return [each._replace(block=None) for each in units_of_blocks([Block([], members)], named)]

    assert split([*range(6)]) == [
        UnitPlan([0, 3], f32, trainable=True),
        UnitPlan([1, 5], f32, trainable=False),
        UnitPlan([2], bf16, trainable=True),
        UnitPlan([4], bf16, trainable=False),
    ]
    assert split([4, 5]) == [
        UnitPlan([4], bf16, trainable=False),
        UnitPlan([5], f32, trainable=False),
    ]
    assert split([]) == []
