"""The server's HTTP side: OpenAI's endpoints, Megatron's own, and what guards them."""
