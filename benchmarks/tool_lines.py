"""Lines of a task with a database as a tool: ours, as docs/agents.md shows it, and the same with TRL.

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


def lines(code: str) -> int:
    return sum(
        bool(line.strip()) and not re.match("import |from |#", line) for line in code.splitlines()
    )


def main() -> None:
    ours = re.search(r"```python\n(# my_tools\.py.*?)```", AGENTS.read_text(), re.DOTALL)
    assert ours is not None
    for name, code in (("tool_task", ours[1]), ("TRL", TRL)):
        print(f"{name:10} {lines(code)}")


if __name__ == "__main__":
    main()
