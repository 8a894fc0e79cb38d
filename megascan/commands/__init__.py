"""The commands of `megascan`: the only rooms that put aggregate, detect and the core together."""
