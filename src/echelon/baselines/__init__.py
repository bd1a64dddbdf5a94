"""Batching strategies to compare with: padded, realigned, and grouped by equal length."""
