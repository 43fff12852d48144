"""vLLM as the library's engine. An engine is a folder, or a file, that implements ``generation/engine.py``. Here:

* ``engine.py``, in the generator's process: the config, and the engine that it builds. It translates requests and results.
* ``worker.py``, in each of vLLM's worker processes: copies a snapshot into the model, and says what the model then holds.
* ``last_block.py``, on CPU only: the rollouts of a group share the last block of their prompt too.
* ``compat/vllm.py`` has all that is private of vLLM.
"""
