raise SystemExit('remote code was executed')
