"""Every number that engine, bench and notebooks show is defined here. No torch, ``bench`` aside."""
