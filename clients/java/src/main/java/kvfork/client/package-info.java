/**
 * A client for kvfork: it streams text from a language model whose state after a prefix can be named, forked and rolled
 * back.
 *
 * <p>Requests and replies are the messages of the contract, package {@code kvfork.v1}; this package adds what a call is
 * about: a {@link kvfork.client.Client} that connects, a {@link kvfork.client.Generation} that streams and can be
 * stopped or cancelled, a {@link kvfork.client.Snapshot} that is a handle, and a {@link
 * kvfork.client.KvforkException} with a reason and details.
 */
package kvfork.client;
