"""The paper's own theorems, bounds and design rule, each found by its number. No guarantee rests on them."""
