"""What every Trine service shares: messages, the bus, the prefix cache, the engine, sampling."""
