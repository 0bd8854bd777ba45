"""Bodies as they may be sent, shown on the page beside each route that takes one; a test sends them all."""

from __future__ import annotations

from typing import Any

FILE, BASE, JOB = "file-0123456789abcdef01234567", "smollm2-135m", "job-0123456789abcdef01234567"
PROJECT, PART = "proj-0123456789abcdef01234567", "part-0123456789abcdef01234567"

BODIES: dict[str, dict[str, Any]] = {
    "PATCH /v1/jobs/{job_id}": {"labels": {"team": "a", "run": None}, "priority": 5},
    "POST /v1/jobs/{job_id}/resume": {"parallel": {"data": 2}},
    "POST /v1/fine_tuning/jobs": {
        "model": BASE,
        "training_file": FILE,
        "suffix": "helper",
        "metadata": {"team": "a"},
        "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3, "batch_size": "auto"}}},
    },
    "POST /v1/fine_tuning/checkpoints/{checkpoint}/permissions": {"project_ids": [PROJECT]},
    "POST /v1/files/{file_id}/preview": {"base": BASE, "limit": 3},
    "POST /v1/uploads": {
        "filename": "train.jsonl", "purpose": "fine-tune", "bytes": 32, "mime_type": "application/jsonl",
    },
    "POST /v1/uploads/{upload_id}/complete": {"part_ids": [PART], "md5": "19c705ae29061872d0016ab37b038c08"},
    "POST /v1/models": {"id": "helper", "source": {"job": JOB}},
    "POST /v1/completions": {"model": BASE, "prompt": "Once upon a time", "max_tokens": 32, "temperature": 0},
    "POST /v1/chat/completions": {
        "model": BASE, "messages": [{"role": "user", "content": "What is a tuple?"}], "temperature": 0, "stream": True,
    },
    "POST /v1/projects": {"name": "team a", "quotas": {"gpu_hours": 500, "concurrent_jobs": 2}},
    "PATCH /v1/projects/{project_id}": {"quotas": {"gpu_hours": None, "storage_bytes": 2**40}},
    "POST /v1/keys": {"name": "ci", "scopes": ["read", "submit"], "expires_in": "90d"},
    "POST /v1/webhook_endpoints": {
        "name": "ci", "url": "https://example.com/hook", "event_types": ["job.succeeded", "job.failed"],
    },
    "POST /v1/webhook_endpoints/{endpoint_id}": {"event_types": ["job.succeeded"]},
    "POST /v1/webhook_endpoints/{endpoint_id}/rotate_secret": {"keep_old_secret_active_for_24_hours": True},
    "POST /v1/webhook_endpoints/{endpoint_id}/test": {"event_type": "job.succeeded"},
}  # fmt: skip
"""By method and path. What a job is asked for with stands beside its spec, `core.spec.JobSpec`."""
