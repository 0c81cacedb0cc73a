"""The program: the only owner of device memory. It runs units on plans and decides nothing."""
