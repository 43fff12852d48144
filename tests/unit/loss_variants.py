"""One of each rl loss, for tests that hold for all of them."""

from torchtitan.experiments.rl.losses import CISPO, DPPO, GSPO, CustomRLLoss, PPOClip


def reinforce(tokens):
    return -tokens.advantages * tokens.logprobs


VARIANTS = [
    DPPO.Config(),
    PPOClip.Config(),
    CISPO.Config(),
    GSPO.Config(),
    CustomRLLoss.Config(function=reinforce),
    DPPO.Config(ratio_max=1.1),
    PPOClip.Config(ratio_max=1.1),
    GSPO.Config(ratio_max=1.1),
]
