// Package kvfork is a client for kvfork: it streams text from a language model whose state after a prefix can be
// named, forked and rolled back.
//
// Requests and replies are the messages of the contract, package kvforkv1; this package adds what a call is about:
// a Client that connects, a Generation that streams and can be stopped or cancelled, a Snapshot that is a handle, and
// an Error with a reason and details.
package kvfork
