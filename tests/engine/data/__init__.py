"""What becomes of people's files before the first step."""
