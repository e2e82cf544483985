"""Serves plans: loads them, schedules steps, runs ranks, speaks HTTP. Knows neither PyTorch nor the compiler."""
