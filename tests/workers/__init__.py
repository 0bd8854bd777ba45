"""What stands between Celery and the engine: each part at its seam, whole attempts with a fake engine."""
