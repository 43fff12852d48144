"""Lines of a task with a database as a tool: ours, as docs/agents.md shows it, and the same for TRL and verifiers.

    python benchmarks/tool_lines.py

Imports and blank lines are not counted.
"""

import re
from pathlib import Path

AGENTS = Path(__file__).resolve().parents[1] / "docs" / "agents.md"

TRL = '''
class Database:
    def reset(self, schema, **row):
        self.connection = sqlite3.connect(":memory:", check_same_thread=False)
        self.connection.executescript(schema)

    def run_sql(self, query: str) -> list:
        """Run a query of SQL and return its rows.

        Args:
            query: the query
        """
        return self.connection.execute(query).fetchall()

ROWS = [{"prompt": [{"role": "user", "content": "How many books are there?"}], "answer": "2", "schema": "CREATE TABLE ..."}]

def right(completions, answer, **columns):
    return [float(one in said[-1]["content"]) for said, one in zip(completions, answer)]

limits, rows = GRPOConfig(max_tool_calling_iterations=4), Dataset.from_list(ROWS)
GRPOTrainer("Qwen/Qwen3-0.6B", right, args=limits, train_dataset=rows, environment_factory=Database).train()
'''

VERIFIERS = '''
async def run_sql(query: str, connection) -> list:
    """Run a query of SQL and return its rows."""
    return connection.execute(query).fetchall()

class Database(vf.StatefulToolEnv):
    def __init__(self, **options):
        super().__init__(**options)
        self.add_tool(run_sql, args_to_skip=["connection"])

    async def setup_state(self, state, **options):
        state["connection"] = sqlite3.connect(":memory:", check_same_thread=False)
        state["connection"].executescript(state["info"]["schema"])

    def update_tool_args(self, tool_name, tool_args, messages, state, **options):
        return tool_args | {"connection": state["connection"]}

ROWS = [{"question": "How many books are there?", "answer": "2", "info": {"schema": "CREATE TABLE ..."}}]

def right(completion, answer, **options):
    return float(answer in completion[-1]["content"])

def load_environment():
    rubric = vf.Rubric(funcs=[right])
    return Database(dataset=Dataset.from_list(ROWS), rubric=rubric, tools=[], max_turns=4)
'''


def lines(code: str) -> int:
    return sum(bool(line.strip()) and not re.match("import |from |#", line) for line in code.splitlines())


def main() -> None:
    ours = re.search(r"```python\n(# my_tools\.py.*?)```", AGENTS.read_text(), re.DOTALL)
    assert ours is not None
    for name, code in (("tool_task", ours[1]), ("TRL", TRL), ("verifiers", VERIFIERS)):
        print(f"{name:10} {lines(code)}")


if __name__ == "__main__":
    main()
