"""Who goes next, past capacity and below it: every ordering under the same requests, in virtual time or live."""
