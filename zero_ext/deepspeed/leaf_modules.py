"""DeepSpeed's marks of leaf modules, whose parameters it gathers at once.

Nothing needs a mark here: ranks may enter different parts of a module, in any order. The calls only
find modules, check their arguments and remember the mark.
"""

from collections.abc import Callable, Iterable

from torch import nn

_MARK = "_zero_ext_leaf"


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module has the mark."""
    return getattr(model, _MARK, False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that have the mark."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Set or remove the mark of one module."""
    setattr(model, _MARK, bool(flag))


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes and of their subclasses, or of classes with these names.

    Returns:
        The modules that were found.
    Raises:
        ValueError: there is none.
    """
    return _set_by_class(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the mark from the modules that ``set_z3_leaf_modules`` would find."""
    return _set_by_class(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules with these names in ``named_modules()``.

    Returns:
        The modules that were found, and the names that were not.
    Raises:
        ValueError: a name was not found.
    """
    return _set_by_name(model, module_names, flag, raise_if_not_found, "named", str.__eq__)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """As ``set_z3_leaf_modules_by_name``, for the ends of names."""
    return _set_by_name(
        model, module_name_suffixes, flag, raise_if_not_found, "whose name ends with", str.endswith
    )


def _set_by_class(
    model: nn.Module, classes: Iterable[type | str], flag: bool, raises: bool
) -> list[nn.Module]:
    classes = list(classes)
    for each in classes:
        if not isinstance(each, (type, str)):
            raise TypeError(f"zero_ext: leaf modules: {each!r} is no class and no name of one.")
    kinds = tuple(each for each in classes if isinstance(each, type))
    found = [
        m
        for m in model.modules()
        if isinstance(m, kinds) or type(m).__name__ in classes or _full_name(m) in classes
    ]
    if not found and raises:
        names = [each if isinstance(each, str) else each.__name__ for each in classes]
        raise ValueError(f"zero_ext: the model has no module of {', '.join(names)}.")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _full_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _set_by_name(
    model: nn.Module,
    names: Iterable[str],
    flag: bool,
    raises: bool,
    described: str,
    fits: Callable[[str, str], bool],
) -> tuple[list[nn.Module], list[str]]:
    found: dict[int, nn.Module] = {}
    missing = []
    for wanted in names:
        fitting = [module for name, module in model.named_modules() if fits(name, wanted)]
        found |= {id(module): module for module in fitting}
        if not fitting:
            missing.append(wanted)
    if missing and raises:
        raise ValueError(f"zero_ext: the model has no module {described} {', '.join(missing)}.")
    for module in found.values():
        set_z3_leaf_module(module, flag)
    return list(found.values()), missing
