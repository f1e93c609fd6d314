"""What serves an engine to many callers at once: its own thread, and asyncio on top of it."""
