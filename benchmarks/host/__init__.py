"""What a step costs the host: time until the last launch, host phases, launches and torch ops."""
