"""What clients send: OpenAI's requests with vLLM's additions, as pydantic models."""
