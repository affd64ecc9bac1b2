"""Images of callers: judged, decoded, held. From files in a request to `service.media` values; no model, no gRPC.

`header` says what a file is before anything in it is decompressed, `decode` makes pixels of it, `uploads` holds files
for those who need them, `intake` does all of it for one call.
"""
