"""Batches, data sets, and chats as token ids."""
