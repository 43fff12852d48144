"""Kinds of filters, samplers, task mixes, datasets and losses."""

from typing import Any

import numpy as np
import torch

from tests.zoo.misbehaviour import Kind, LyingLength, LyingNumber, answering, changing
from tests.zoo.own.makers import Own, harmless, refused, with_, wrong_types
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutStatus


def _rotate(group: Any) -> None:
    group.rollouts.append(group.rollouts.pop(0))


MATCHES: Own = wrong_types() | refused(
    answers_too_few=changing(lambda matches: matches[:-1]),
    answers_too_many=changing(lambda matches: [*matches, False]),
    answers_a_bool=answering(lambda: False),
    answers_nan_each=answering(lambda: [float("nan")] * 4),
    answers_arrays=answering(lambda: [np.ones(2, bool)] * 4),
    answers_texts=answering(lambda: ["no"] * 4),
    answers_None_each=answering(lambda: [None] * 4),
    answers_lying_numbers=answering(lambda: [LyingNumber()] * 4),
    answers_a_lying_length=answering(LyingLength),
) | harmless(
    pops_a_rollout=Kind(meddle=lambda entry, group: group.rollouts.pop()),
    clears_the_rollouts=Kind(meddle=lambda entry, group: group.rollouts.clear()),
    rotates_the_rollouts=Kind(meddle=lambda entry, group: _rotate(group)),
    sets_rewards_to_None=Kind(meddle=lambda entry, group: [setattr(r, "reward", None) for r in group.rollouts]),
    sets_rewards=Kind(meddle=lambda entry, group: [setattr(r, "reward", 9.0) for r in group.rollouts]),
    changes_token_ids=Kind(meddle=lambda entry, group: group.rollouts[0].samples[0].token_ids.fill(7)),
    changes_advantages=Kind(meddle=lambda entry, group: group.rollouts[0].samples[0].advantages.fill(9)),
    clears_samples=Kind(meddle=lambda entry, group: group.rollouts[0].samples.clear()),
    sets_the_status=Kind(meddle=lambda entry, group: setattr(group.rollouts[0], "status", RolloutStatus.ERROR)),
    sets_the_group_id=Kind(meddle=lambda entry, group: setattr(group, "group_id", "good-0")),
)  # fmt: skip
OBSERVE: Own = harmless(
    answers_something=changing(lambda answer: "seen"),
    clears_the_rollouts=Kind(meddle=lambda entry, group: group.rollouts.clear()),
    rotates_the_rollouts=Kind(meddle=lambda entry, group: _rotate(group)),
    sets_rewards=Kind(
        meddle=lambda entry, group: [setattr(r, "reward", 9.0) for r in group.rollouts]
    ),
    changes_token_ids=Kind(
        meddle=lambda entry, group: group.rollouts[0].samples[0].token_ids.fill(7)
    ),
    changes_advantages=Kind(
        meddle=lambda entry, group: group.rollouts[0].samples[0].advantages.fill(9)
    ),
    sets_the_group_id=Kind(meddle=lambda entry, group: setattr(group, "group_id", "good-0")),
)
SAMPLE: Own = wrong_types() | refused(
    answers_an_id_of_a_number=with_(sample_id=7),
    answers_an_id_of_None=with_(sample_id=None),
    answers_info_of_a_text=with_(info="x"),
    answers_info_of_None=with_(info=None),
    answers_the_class=answering(lambda: DataSample),
)
MIX_NEXT: Own = wrong_types() | refused(
    answers_no_task=answering(lambda: "no such task"),
    answers_an_empty_text=answering(lambda: ""),
    answers_a_list=answering(lambda: ["good"]),
)
LENGTH: Own = wrong_types("a number") | refused(
    answers_minus_1=answering(lambda: -1),
    answers_0=answering(lambda: 0),
    answers_a_float=answering(lambda: 8.0),
    answers_10_to_the_30=answering(lambda: 10**30),
)
GETITEM: Own = SAMPLE


# ---- the loss

LOSS: Own = wrong_types() | refused(
    answers_the_sum=changing(torch.sum),
    answers_another_shape=changing(lambda losses: losses[:, :-1]),
    answers_one_more_dimension=changing(lambda losses: losses[None]),
    answers_an_array=changing(lambda losses: losses.detach().numpy()),
    answers_a_list=changing(lambda losses: losses.tolist()),
    answers_nan_everywhere=changing(lambda losses: losses * float("nan")),
    answers_infinity=changing(lambda losses: losses + float("inf")),
    answers_integers=changing(lambda losses: losses.detach().long()),
    answers_complex=changing(lambda losses: losses * 1j),
    answers_without_a_gradient=changing(lambda losses: losses.detach()),
    answers_an_infinite_gradient=Kind(change=lambda losses, tokens: _steep(tokens.logprobs)),
    answers_a_pair=changing(lambda losses: (losses, losses)),
) | harmless(
    changes_the_advantages=Kind(change=lambda losses, tokens: _then(losses, tokens.advantages.fill_(9))),
    changes_the_members=Kind(change=lambda losses, tokens: _then(losses, tokens.member.fill_(True))),
    empties_the_members=Kind(change=lambda losses, tokens: _then(losses, tokens.member.fill_(False))),
    changes_the_generator_log_probabilities=Kind(
        change=lambda losses, tokens: _then(losses, tokens.generator_logprobs.fill_(-9))
    ),
    changes_the_sequence_ids=Kind(change=lambda losses, tokens: _then(losses, tokens.sequence_ids.fill_(0))),
)  # fmt: skip


def _steep(logprobs: Any) -> Any:
    """0 everywhere, and the gradient is infinite."""
    return torch.sqrt((logprobs - logprobs.detach()).abs())


def _then(losses: Any, _: Any) -> Any:
    return losses
