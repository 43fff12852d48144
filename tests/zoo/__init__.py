"""The zoo: user code that misbehaves in every place where the library calls it, run through a real Controller.

``python -m tests.zoo`` runs all cases; ``-k PATTERN`` those whose name holds the pattern. Each case runs in a forked child with
a deadline. Read `cases.py` for what there is, `checks.py` for what each case must satisfy.

    world.py          honest tasks, envs, rubrics, samplers, ...: what a case replaces one method of
    stand_ins.py      trainer, generators and weights in this process: what the Controller otherwise spawns
    misbehaviour.py   kinds: what the replaced method does
    places.py         places: which method is replaced, who is hurt by it, and what its culprit is called
    cases.py          places x kinds
    scene.py          runs one case and collects what can be seen of it
    checks.py         what must hold
    children.py       forked children with a deadline
"""
