"""The message bus: one protocol, a NATS implementation and an in-memory one for tests."""
