"""The HTTP face: OpenAI's endpoints, health, readiness and metrics over one `Service`."""
