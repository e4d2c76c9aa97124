"""A training step: ours beside the same model written with nn.TransformerEncoder in eager mode, for pytest-benchmark.

The model and the settings are those of the protocol `lra-small`; on a GPU in bfloat16 and, for ours, compiled and as
CUDA graphs, as `benchmarks/lra-small.toml` trains; on a CPU in float32. Both read the same batches; ours makes them
inside what is timed. Before timing, both must give the same logits from the same weights. A round is
`steps_per_round` updates, so that the host is seen to run ahead of the GPU, as it does in a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch_encoder import TorchClassifier, TorchTrainer

from attn_zoo.registry import variants
from attn_zoo.tasks import Split, TaskSpec
from attn_zoo.training.batches import Batcher, Feed
from attn_zoo.training.loop import Trainer
from attn_zoo.training.objective import objective_for
from attn_zoo.training.protocol import Protocol, resolve_protocol

SEQ_LENS = (1024,)
NUM_CLASSES, VOCAB_SIZE, NUM_EXAMPLES = 10, 18, 256  # sizes of ListOps

PEERS = ("ours", "ours, compiled", "nn.TransformerEncoder, eager", "nn.TransformerEncoder, compiled")


def _spec(seq_len: int, *, has_padding: bool) -> TaskSpec:
    return TaskSpec(
        kind="classification",
        metric="accuracy",
        chance=1 / NUM_CLASSES,
        vocab_size=VOCAB_SIZE,
        num_classes=NUM_CLASSES,
        max_seq_len=seq_len,
        has_padding=has_padding,
    )


def _feed(batcher: Batcher, seq_len: int, *, has_padding: bool) -> Feed:
    """Return random examples; with padding, of a quarter of the length and more, as expressions are."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, VOCAB_SIZE, (NUM_EXAMPLES, seq_len), dtype=torch.uint8, generator=generator)
    lengths = torch.full((NUM_EXAMPLES,), seq_len)
    if has_padding:
        lengths = torch.randint(seq_len // 4, seq_len + 1, (NUM_EXAMPLES,), generator=generator)
    labels = torch.randint(NUM_CLASSES, (NUM_EXAMPLES,), generator=generator)
    return batcher.feed(Split(tokens=tokens, lengths=lengths, labels=labels))


def _expect_the_same_model(trainer: Trainer, plain: TorchClassifier, feed: Feed) -> None:
    """Give the plain model our weights and compare logits, in float32."""
    plain.load_ours(trainer.model)
    batch = trainer.batcher.batch(feed, torch.arange(4))
    with torch.no_grad():
        ours = trainer.objective.outputs(trainer.model.eval(), batch)
        theirs = plain.eval()(batch.tokens, batch.key_padding_mask)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    plain.train()


def _steps(name: str, protocol: Protocol, seq_len: int, device: str, *, has_padding: bool) -> Callable[[], None]:
    """Return what a round does: as many updates as lie between two evaluations."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    spec = _spec(seq_len, has_padding=has_padding)
    objective = objective_for(spec)
    batcher = Batcher(spec, protocol, variants["full"].capabilities, device)
    config = protocol.model_config(variant="full", options={}, vocab_size=VOCAB_SIZE, max_seq_len=seq_len, seed=0)
    model = objective.build_model(config).to(device)
    plain = TorchClassifier(config, NUM_CLASSES).to(device)
    feed = _feed(batcher, seq_len, has_padding=has_padding)
    is_compiled = name.endswith("compiled")
    if is_compiled and name.startswith("ours"):
        protocol = replace(protocol, compile=True)
    trainer = Trainer(model, objective, batcher, protocol, num_steps=protocol.num_steps, seed=0, dtype=dtype)
    _expect_the_same_model(trainer, plain, feed)
    order = trainer.order(feed)

    def ours() -> None:
        trainer.advance(feed, order)

    if name.startswith("ours"):
        return ours
    theirs = TorchTrainer(plain, protocol, dtype)
    if is_compiled:
        theirs.model.compile()
    batches = [batcher.batch(feed, order.rows(step)) for step in range(1, protocol.eval_every + 1)]

    def them() -> None:
        for batch in batches:
            theirs.update(batch)
        if device == "cuda":
            torch.cuda.synchronize()

    return them


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("has_padding", [False, True], ids=["full-length", "padded"])
def test_training_step(benchmark: Any, device: str, name: str, has_padding: bool, seq_len: int) -> None:
    steps = 20 if device == "cuda" else 1
    overrides = {"eval_every": steps, "num_steps": 10_000, "is_full_length": True}
    protocol = resolve_protocol("lra-small", overrides=overrides)
    if device == "cpu" and name.endswith("compiled"):
        pytest.skip("compiled is how a GPU trains")
    run = _steps(name, protocol, seq_len, device, has_padding=has_padding)
    for _ in range(3 if name.endswith("compiled") else 1):  # compiles, and records graphs
        run()
    benchmark.group = f"training step, {'padded' if has_padding else 'full length'}, {seq_len} tokens"
    benchmark.extra_info.update(
        peer=name,
        steps_per_round=steps,
        seq_len=seq_len,
        batch_size=protocol.batch_size,
        device=device,
        num_threads=torch.get_num_threads(),
    )
    benchmark.pedantic(run, rounds=5)
