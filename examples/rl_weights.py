"""TRL's GRPO over a sharded model. After each step another process gets the weights that changed.

torchrun --nproc-per-node 2 examples/rl_weights.py --stage 2 --steps 20

The other process stands for an inference engine. It imports torch and a copy of one file, without
zero_ext. It answers each step with a hash of its weights. The trainer computes the same hash of its
whole parameters, and raises an error if they differ.

It needs `pip install trl` and no network: the model is small and random, its tokens are letters.
"""

import argparse
import hashlib
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

LETTERS = "abcdefghijklmnop"
WANTED = "g"  # a completion's reward is this letter's share of it


def hash_of(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    lines = []
    for name, value in weights:
        data = value.detach().cpu().view(torch.uint8).numpy().tobytes()
        lines.append(f"{name} {hashlib.sha256(data).hexdigest()}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def serve() -> None:
    """The other process: applies the changes that it reads, and prints a hash after each step."""
    from receiving import apply_changes  # type: ignore[import-not-found] # the copy

    weights: dict[str, torch.Tensor] = {}  # an engine has its own, of the trainer's shapes
    while True:
        try:
            changes = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        for name, _, values, _ in changes:
            weights.setdefault(name, torch.zeros_like(values))
        written = apply_changes(weights, changes)
        assert "zero_ext" not in sys.modules
        print(written, hash_of(weights.items()), flush=True)


def start_engine(folder: str, receiving: Path) -> Any:
    shutil.copy(receiving, folder)
    command = [sys.executable, shutil.copy(__file__, folder), "--serve"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def train(args: argparse.Namespace, folder: str) -> None:
    import datasets
    import tokenizers
    import transformers
    import trl

    import zero_ext
    from zero_ext.integrations.transformers import ShardedTrainerMixin

    class Trainer(ShardedTrainerMixin, trl.GRPOTrainer):
        pass

    class HandOver(transformers.TrainerCallback):
        sent: Any = None  # the token of the weights that the engine has

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                receiving = Path(zero_ext.__file__).parent / "state" / "receiving.py"
                self.engine = start_engine(folder, receiving)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model, step = kwargs["model"], state.global_step
            token = zero_ext.change_token(model)  # before changes are read: nothing gets lost
            changes = zero_ext.iter_changed_params(model, since=self.sent, rank0_only=True)
            to_send = [tuple(change) for change in changes]  # the engine has no ChangedParam
            self.sent = token
            expected = hash_of(zero_ext.iter_full_params(model, rank0_only=True))
            if state.is_world_process_zero:
                pickle.dump(to_send, self.engine.stdin)
                self.engine.stdin.flush()
                written, _, found = self.engine.stdout.readline().decode().strip().partition(" ")
                if found != expected:
                    raise RuntimeError(f"step {step}: the engine's weights are not the trainer's")
                print(f"step {step}: {written} of {model.num_parameters()} weights, {found[:8]}")

    ids = {token: i for i, token in enumerate(["<pad>", "<eos>", *LETTERS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    config = transformers.LlamaConfig(
        vocab_size=len(ids), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = Trainer(
        transformers.LlamaForCausalLM(config).bfloat16(),
        lambda completion_ids, **_: [c.count(ids[WANTED]) / len(c) for c in completion_ids],
        trl.GRPOConfig(
            folder, max_steps=args.steps, learning_rate=args.lr, per_device_train_batch_size=16,
            num_generations=8, max_completion_length=8, logging_steps=1, save_strategy="no",
            disable_tqdm=True, report_to=[], use_cpu=True, bf16=False,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": [*LETTERS]}),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
        ),
        callbacks=[HandOver()],
        stage=args.stage,
    )  # fmt: skip
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    if trainer.is_world_process_zero():
        print(f"mean reward: {rewards[0]:.2f} in the first step, {rewards[-1]:.2f} in the last")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3), help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        train(args, folder)


if __name__ == "__main__":
    serve() if "--serve" in sys.argv else main()
