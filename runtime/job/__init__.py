"""Batch jobs: rows in, one result row per input row out, in order, whatever happens in between.

Input is JSONL (also `.gz`, `.zst`), Parquet with the same columns, a folder or a glob of such files (sorted by name).
A row has one of two forms, and its result has the matching one:

* OpenAI batch rows `{custom_id, method, url, body}` for `/v1/chat/completions` and `/v1/completions`;
  result `{id, custom_id, response: {status_code, request_id, body}, error}`.
* simple rows `{id?, prompt | prompt_token_ids | messages, model?, any field of SamplingParams}`;
  result `{id, index, outputs, usage, error}`.

Blank lines are skipped and do not count as rows; a row without an id is called `row-<index>`.
While a job runs, `<output>.journal` holds every finished row; at the end the ordered output appears atomically,
with `<output>.summary.json` beside it.

This package imports nothing heavy; the engine comes from the factory that `run_job` is given.
"""

from pagefleet.runtime.job.batch_job import JobEngine, run_job

__all__ = ["JobEngine", "run_job"]
