"""The controller believes no generator: a receipt has to be of the version asked for, and of the fingerprint published."""

from types import SimpleNamespace

import numpy as np
import pytest

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.weights.snapshot import WeightReceipt
from torchtitan.experiments.rl.weights.sync import CANARY_TOKENS, CanaryBound, CopiedOut, WeightSync


def receipt(version: int = 5, fingerprint: str = "aa", canary: float = -1.0) -> WeightReceipt:
    logprobs = np.full(CANARY_TOKENS, canary, np.float32)
    return WeightReceipt(
        version=version,
        fingerprint=fingerprint,
        canary_logprobs=logprobs,
        verify_s=0.1,
        reload_s=0.2,
    )


async def update(*receipts: WeightReceipt):
    """Version 5 of fingerprint "aa", which the trainer's canary says is worth -1 a token."""

    async def answer(value):
        return value

    proof = "aa", np.full(CANARY_TOKENS, -1.0, np.float32)
    rank = SimpleNamespace(proof=SimpleNamespace(choose=lambda: answer(proof)))
    trainer = SimpleNamespace(size=lambda dim: 2, slice=lambda procs: rank)
    generators = SimpleNamespace(
        update_weights=lambda version, canary: answer(dict(enumerate(receipts)))
    )
    sync = WeightSync(
        trainer, generators, text=np.arange(CANARY_TOKENS), bound=CanaryBound("float32")
    )
    return await sync.update(CopiedOut(version=5, seconds=1.0))


async def test_receipts_of_the_published_version_pass():
    report = await update(receipt(), receipt(canary=-1.0005))
    assert (
        report.version == 5
        and report.canary_max_diff == pytest.approx(0.0005, rel=1e-3)
        and report.reload_s == 0.2
    )


@pytest.mark.parametrize(
    "wrong, error",
    [
        (receipt(version=4), "generator 1 answered version 5 with the weights of version 4"),
        (
            receipt(fingerprint="bb"),
            "generator 1 holds weights of fingerprint bb as version 5; the trainer published aa",
        ),
        (receipt(canary=-1.1), "generator 1 and trainer disagree on version 5"),
        (receipt(canary=np.nan), "generator 1 and trainer disagree on version 5"),
    ],
)
async def test_a_receipt_of_anything_else_ends_the_run_by_replica_version_and_values(wrong, error):
    with pytest.raises(RunError) as caught:
        await update(receipt(), wrong)
    assert str(caught.value).startswith(error)


async def test_replicas_that_hold_the_same_wrong_weights_do_not_pass_for_agreeing():
    with pytest.raises(RunError, match="generator 0 holds weights of fingerprint bb"):
        await update(receipt(fingerprint="bb"), receipt(fingerprint="bb"))


def test_the_bound_of_bfloat16_follows_from_the_first_versions_and_that_of_float32_is_fixed():
    exact, learned = CanaryBound("float32"), CanaryBound("bfloat16")
    for version, difference in enumerate((0.3, 0.1, 1.4, 0.2, 0.2)):
        assert (exact.nats, learned.nats) == (1e-3, 10.0)
        exact.passed(version, 5e-4)
        learned.passed(version, difference)
    assert exact.nats == 1e-3
    assert learned.nats == pytest.approx(7.0), "five times 1.4"
    learned.passed(5, 6.0)
    assert learned.nats == pytest.approx(7.0), "a later version moves it no more"
    small = CanaryBound("bfloat16")
    for version in range(5):
        small.passed(version, 0.01)
    assert small.nats == 1.0


async def test_replicas_that_join_at_the_first_version_do_not_make_the_bound_alone():
    async def answer(value):
        return value

    def logprobs(difference: float) -> np.ndarray:
        return np.full(CANARY_TOKENS, -1.0 - difference, np.float32)

    trainer = SimpleNamespace(
        size=lambda dim: 1,
        slice=lambda procs: None,
        score=SimpleNamespace(call=lambda ids: answer({0: logprobs(0.0)})),
    )
    bound = CanaryBound("bfloat16")
    sync = WeightSync(trainer, None, text=np.arange(CANARY_TOKENS), bound=bound)
    for replica in range(8):
        actor = SimpleNamespace(
            canary=SimpleNamespace(call_one=lambda ids, by=replica: answer(logprobs(by / 4)))
        )
        await sync.admit(replica, actor, lambda: answer(None))
    assert bound.nats == 10.0, "one version was seen"
    for version in range(1, 5):
        bound.passed(version, 0.1)
    assert bound.nats == pytest.approx(5 * 7 / 4)
