"""``state_dict`` and ``load_state_dict`` of a module whose parameters are released (stage 3)."""

import torch
from torch import nn

from zero_ext.engine.carried import CarriedMethod
from zero_ext.engine.handle import Handle
from zero_ext.engine.registry import find
from zero_ext.engine.units import Tree
from zero_ext.ranks.agreement import calling
from zero_ext.tensor.shard_tensor import ShardTensor


class StateDictHooks:
    """``state_dict()`` gets ShardTensors; ``load_state_dict()`` writes to whole parameters.

    Nothing here refers to a module: submodules carry this, and would be in a cycle.
    """

    def __init__(self, handle: Handle):
        self._handle = handle
        self._loading: nn.Module | None = None  # whose load_state_dict() runs
        self._held_before_load = False

    def attach(self, tree: Tree) -> None:
        """To the root and to each module that has sharded parameters of its own."""
        put, before = CarriedMethod(self.put_shards), CarriedMethod(self.before_load)
        after = CarriedMethod(self.after_load)
        for each in {tree.root: "", **tree.owners(self._handle.entries.keys())}:
            if each is tree.root or not isinstance(each, torch.jit.ScriptModule):
                each.register_state_dict_post_hook(put)
                each.register_load_state_dict_pre_hook(before)
                each.register_load_state_dict_post_hook(after)

    def put_shards(self, module: nn.Module, state_dict, prefix: str, metadata) -> None:
        """Put ShardTensors in the places of parameters that come and go.

        Which of them this rank has in memory does not matter, because ranks may differ in that.
        Exception: after ``unshard()`` the tensors are plain ones. Uses the current names: layers
        may have been moved since the module was sharded.
        """
        engine = self._handle.engine
        if not engine.releases or engine.held_by_user:
            return
        engine.release_kept()
        for owner_name, owner in module.named_modules(remove_duplicate=False):
            for name, parameter in owner._parameters.items():
                if not self._handle.holds(parameter):
                    continue
                key = f"{prefix}{owner_name}.{name}" if owner_name else prefix + name
                value = state_dict.get(key)
                if value is None or value is parameter or isinstance(value, ShardTensor):
                    continue  # left out; keep_vars; done by a submodule's hook
                _, i = find(parameter)
                if engine.comes_and_goes(i):
                    local = engine.parameter_slice(i)
                    state_dict[key] = self._handle.as_parameter(local, i, parameter)

    def before_load(self, module: nn.Module, state_dict, prefix: str, *rest) -> None:
        engine = self._handle.engine
        if not engine.releases or self._loading not in (None, module):
            return  # or the module around this one has gathered the parameters
        self._loading = module
        self._held_before_load = engine.held_by_user
        with calling("load_state_dict()"):
            engine.unshard()
            for key, value in state_dict.items():
                if key.startswith(prefix) and isinstance(value, ShardTensor):
                    state_dict[key] = value.gathered()

    def after_load(self, module: nn.Module, incompatible_keys) -> None:
        if self._loading is not module:
            return
        self._loading = None
        if not self._held_before_load:
            with calling("load_state_dict()"):
                self._handle.reshard(keep_writes=True)
