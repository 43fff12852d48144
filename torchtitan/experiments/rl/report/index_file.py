"""The index's own file: its tables, and how it is opened."""

import sqlite3

INDEX_FILE = ".report-index.sqlite"
FORMAT = 3
"""Of the tables below; an index of another format is made anew."""
TABLES = """
CREATE TABLE files (name TEXT PRIMARY KEY, read_to INTEGER, tail BLOB, digest BLOB);
CREATE TABLE metrics (name TEXT, step INTEGER, value REAL, PRIMARY KEY (name, step)) WITHOUT ROWID;
CREATE TABLE ledger (rollout_id TEXT, task TEXT, dispatched INTEGER, column_ TEXT, ended INTEGER);
CREATE INDEX ledger_ends ON ledger (task, column_, ended);
CREATE TABLE rollouts (
    place INTEGER, line INTEGER, rollout_id TEXT, group_id TEXT, task TEXT, status TEXT, outcome TEXT, step INTEGER,
    reward REAL, turns INTEGER, tokens INTEGER, error TEXT, sample_id TEXT, evaluation TEXT, PRIMARY KEY (place, line)
) WITHOUT ROWID;
CREATE INDEX rollouts_ids ON rollouts (rollout_id);
CREATE INDEX rollouts_groups ON rollouts (group_id);
CREATE INDEX rollouts_chosen ON rollouts (task, outcome, step, reward);
CREATE INDEX rollouts_evaluated ON rollouts (evaluation, task) WHERE evaluation IS NOT NULL;
"""


def connected(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA synchronous = OFF")  # it can be made again
        connection.execute("PRAGMA journal_mode = MEMORY")  # and no other file is written
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("BEGIN IMMEDIATE")
        statements = [statement.strip() for statement in TABLES.split(";") if statement.strip()]
        found = [row[0] for row in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")]
        if connection.execute("PRAGMA user_version").fetchone()[0] != FORMAT or found != statements:
            for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                connection.execute(f'DROP TABLE "{table}"')
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.commit()
    except BaseException:
        connection.close()
        raise
    return connection
