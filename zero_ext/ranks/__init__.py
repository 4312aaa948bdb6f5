"""Process groups, and what ranks must agree on."""
