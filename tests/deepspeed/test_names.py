"""Names that public code imports from DeepSpeed: here, or an error that says what to use."""

import importlib
import itertools
import logging

import pytest
import torch
from harness import MLP, assert_bits
from setups import values_of
from test_initialize import initialized, train
from torch import nn

import zero_ext
import zero_ext.deepspeed as deepspeed
from zero_ext.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param
from zero_ext.deepspeed.utils import zero_to_fp32

HERE = """
: initialize init_distributed add_config_arguments DeepSpeedEngine OnDevice __version__
accelerator: get_accelerator
accelerator.real_accelerator: get_accelerator
comm: init_distributed all_reduce barrier get_rank get_world_size is_initialized ReduceOp
comm.comm: all_gather_into_tensor broadcast
checkpointing: checkpoint configure is_configured
ops.adagrad: DeepSpeedCPUAdagrad
ops.adam: DeepSpeedCPUAdam FusedAdam
ops.lamb: FusedLamb
ops.lion: DeepSpeedCPULion FusedLion
runtime.activation_checkpointing: checkpointing
runtime.activation_checkpointing.checkpointing: checkpoint non_reentrant_checkpoint
runtime.compiler: is_compile_supported
runtime.dataloader: RepeatingLoader
runtime.engine: DeepSpeedEngine
runtime.lr_schedules: WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest
runtime.utils: see_memory_usage clip_grad_norm_
runtime.zero: GatheredParameters Init register_external_parameter unwrap_model_for_generation
runtime.zero.config: ZeroStageEnum
runtime.zero.offload_config: OffloadDeviceEnum OffloadStateTypeEnum
runtime.zero.partition_parameters: ZeroParamStatus GatheredParameters Init is_zero_param
utils: logger log_dist safe_get_full_fp32_param safe_get_full_grad set_z3_leaf_modules
utils.init_on_device: OnDevice
utils.logging: logger log_dist
utils.nvtx: instrument_w_nvtx
utils.tensor_fragment: safe_get_full_optimizer_state safe_set_full_fp32_param
utils.z3_leaf_module: set_z3_leaf_modules
utils.zero_to_fp32: get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint
utils.zero_to_fp32: convert_zero_checkpoint_to_fp32_state_dict
zero: GatheredParameters Init register_external_parameter
"""
ABSENT = {
    ("", "PipelineModule"): "data parallelism alone",
    ("", "init_inference"): "an inference server",
    ("autotuning", "Autotuner"): r"zero_ext\.plan",
    ("checkpoint", "DeepSpeedCheckpoint"): "any number of ranks",
    ("elasticity", "compute_elastic_config"): r"zero_ext\.elastic",
    ("launcher.runner", "main"): "torchrun",
    ("moe.layer", "MoE"): "data parallelism alone",
    ("monitor.monitor", "MonitorMaster"): "a logger of your own",
    ("ops.op_builder", "CPUAdamBuilder"): "Nothing is compiled",
    ("pipe", "PipelineModule"): "data parallelism alone",
    ("profiling.flops_profiler", "get_model_profile"): "FlopCounterMode",
    ("runtime.config", "DeepSpeedConfig"): r"initialize\(config=\)",
    ("runtime.engine", "MEMORY_OPT_ALLREDUCE_SIZE"): r"docs/migration\.md",
    ("runtime.fp16.loss_scaler", "DynamicLossScaler"): r"zero_ext\.LossScaler",
    ("runtime.zero.stage3", "estimate_zero3_model_states_mem_needs_all_live"): "estimate_memory",
    ("sequence.layer", "DistributedAttention"): "data parallelism alone",
    ("utils.timer", "ThroughputTimer"): r"torch\.profiler",
    ("zero", "TiledLinear"): r"nn\.Linear",
}


def names_here():
    for line in HERE.split("\n"):
        path, _, names = line.partition(":")
        yield from ((path, name) for name in names.split())


def imported(path: str, name: str):
    given: dict = {}
    exec(f"from {f'zero_ext.deepspeed.{path}'.rstrip('.')} import {name}", given)
    return given[name]


def test_names_are_imported_and_reached_by_attribute():
    assert len(set(names_here())) >= 45
    for path, name in names_here():
        found = deepspeed
        for part in filter(None, path.split(".")):
            found = getattr(found, part)
        if path != "utils.z3_leaf_module":  # a function, too
            assert getattr(found, name) is imported(path, name), (path, name)


@pytest.mark.parametrize(("path", "name"), ABSENT)
def test_what_is_not_here_names_the_way(path, name):
    with pytest.raises(
        ImportError, match=rf"'{name}' of deepspeed.* is not here.*{ABSENT[path, name]}"
    ):
        imported(path, name)


def test_modules_that_nobody_has_are_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("zero_ext.deepspeed.nothing")
    with pytest.raises(ImportError, match=r"'nothing' of deepspeed\.runtime\.zero is not here"):
        _ = deepspeed.runtime.zero.nothing
    for module in (deepspeed.accelerator, deepspeed.ops, deepspeed.runtime, deepspeed.utils):
        assert not hasattr(module, "nothing")  # scripts ask, and go on
    assert not hasattr(deepspeed, "nothing") and not hasattr(deepspeed.comm, "__wrapped__")


def test_fp32_values_of_a_checkpoint(anywhere, rank, tmp_path, request):
    folder = tmp_path if anywhere is None else request.getfixturevalue("shared_path")
    engine = initialized(anywhere, MLP(13), 3, bf16={"enabled": True})
    train(engine, rank, [0, 1])
    assert all(map(is_zero_param, engine.parameters()))
    engine.save_checkpoint(folder / "saved", tag="two")
    masters = {n: zero_ext.full_tensor(p) for n, p in engine.module.named_parameters()}
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder / "saved")
    assert found.keys() == masters.keys()
    for name, value in found.items():
        assert value.dtype == torch.float32
        assert_bits(value, masters[name].cpu())
    plain = zero_to_fp32.load_state_dict_from_zero_checkpoint(MLP(13), folder / "saved", "two")
    assert_bits(dict(plain.named_parameters())["layers.0.weight"].data, found["layers.0.weight"])
    file = tmp_path / f"{rank}.pt"
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder / "saved", file)
    for name, value in torch.load(file).items():
        assert_bits(value, found[name])
    with pytest.raises(ValueError, match=f"there is no checkpoint at '{folder}'"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, file)


def test_a_loader_that_repeats():
    loader = imported("runtime.dataloader", "RepeatingLoader")([3, 1, 4])
    assert len(loader) == 3
    assert list(itertools.islice(loader, 7)) == [3, 1, 4, 3, 1, 4, 3]
    with pytest.raises(StopIteration):
        next(imported("runtime.dataloader", "RepeatingLoader")([]))


def test_parameters_on_a_device_in_a_dtype():
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        weight = nn.Linear(3, 5).weight
    assert weight.is_meta and weight.dtype == torch.bfloat16
    with pytest.raises(KeyError), deepspeed.OnDevice(dtype=torch.float64, device="cpu"):
        raise KeyError
    with deepspeed.OnDevice(dtype=torch.float16, enabled=False):
        weight = nn.Linear(3, 5).weight
    assert weight.dtype == torch.float32 and not weight.is_meta


def test_calls_that_log_or_profile(rank, caplog):
    with caplog.at_level(logging.INFO, "zero_ext"):
        imported("runtime.utils", "see_memory_usage")("before", force=True)
        imported("runtime.utils", "see_memory_usage")("not told")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition("] ")[2][:7] for line in lines] == ["before:"] * (rank == 0)
    shown = imported("utils.nvtx", "instrument_w_nvtx")(values_of)
    with torch.profiler.profile() as profile:
        shown(nn.Linear(3, 5))
    assert "values_of" in {event.name for event in profile.events()}


def test_states_to_offload(anywhere, rank):
    kinds = imported("runtime.zero.offload_config", "OffloadStateTypeEnum")
    assert [*imported("runtime.zero.config", "ZeroStageEnum")] == [0, 1, 2, 3]
    engine = initialized(anywhere, MLP(13), 2)
    train(engine, rank, [0, 1])
    for kind in kinds:
        engine.offload_states(include=[kind])
        engine.reload_states()
    with pytest.raises(ValueError, match="nothing"):
        engine.offload_states(include=["nothing"])
    assert ZeroParamStatus.NOT_AVAILABLE == 2
