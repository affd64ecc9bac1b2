package kvfork.client;

import java.util.List;
import java.util.Map;
import java.util.function.Supplier;
import java.util.stream.Stream;
import kvfork.v1.DeleteSnapshotRequest;
import kvfork.v1.ForkBranch;
import kvfork.v1.ForkRequest;
import kvfork.v1.GenerateRequest;
import kvfork.v1.GetSnapshotRequest;
import kvfork.v1.RollbackRequest;
import kvfork.v1.UpdateSnapshotRequest;
import kvfork.v1.Usage;

/** A handle: a name for a state that never changes. */
public final class Snapshot {
  private final Client client;
  private final Usage usage;
  private final Map<Integer, Snapshot> marks;
  private final List<String> released;
  private volatile kvfork.v1.Snapshot info;
  private volatile KvforkException gone;

  Snapshot(Client client, kvfork.v1.Snapshot info) {
    this(client, info, null, Map.of(), List.of());
  }

  Snapshot(
      Client client, kvfork.v1.Snapshot info, Usage usage, Map<Integer, Snapshot> marks, List<String> released) {
    this.client = client;
    this.info = info;
    this.usage = usage;
    this.marks = marks;
    this.released = released;
  }

  /** {@code snapshots/{id}}. */
  public String name() {
    return info.getName();
  }

  /** The length of its prefix. */
  public int tokenCount() {
    return info.getTokenCount();
  }

  /** What the server last said of it. */
  public kvfork.v1.Snapshot info() {
    return info;
  }

  /** The receipt of the call that made it; null if it was looked up. */
  public Usage usage() {
    return usage;
  }

  /** Of {@link Client#createSnapshot}, by the index of their mark. */
  public Map<Integer, Snapshot> marks() {
    return marks;
  }

  /** What its rollback let go of. */
  public List<String> released() {
    return released;
  }

  /** The error by which the server told that it is no more; null as long as it has not. */
  public KvforkException gone() {
    return gone;
  }

  /** Goes on from here. */
  public Generation generate(GenerateRequest request) {
    return new Generation(client, request, this);
  }

  /** So many names for this state: nothing is copied. All or none. */
  public List<Snapshot> fork(int count) {
    return fork(Stream.generate(ForkBranch::getDefaultInstance).limit(count).toList());
  }

  /** One child per branch, each with what it appends. All or none. Each one's usage is the receipt of the whole call. */
  public List<Snapshot> fork(List<ForkBranch> branches) {
    var request = ForkRequest.newBuilder().setParent(name()).setRequestId(Client.idOr(""));
    for (ForkBranch branch : branches) {
      var own = branch.toBuilder();
      if (branch.hasAppend()) {
        own.setAppend(Inputs.continued(branch.getAppend(), name()));
      }
      request.addBranches(own);
    }
    var reply = noting(() -> client.call(Methods.FORK, request.build()));
    return reply.getSnapshotsList().stream()
        .map(made -> new Snapshot(client, made, reply.getUsage(), Map.of(), List.of()))
        .toList();
  }

  /** Keeps so many tokens, in a new snapshot. */
  public Snapshot rollbackTo(int tokens) {
    return rollback(RollbackRequest.newBuilder().setTokenCount(tokens));
  }

  /** Drops so many tokens from the end, in a new snapshot. */
  public Snapshot drop(int tokens) {
    return rollback(RollbackRequest.newBuilder().setDropTokens(tokens));
  }

  /**
   * A snapshot of a shorter prefix; this one stays, unless it is released. The request has a target: token_count,
   * drop_tokens or ancestor.
   */
  public Snapshot rollback(RollbackRequest.Builder request) {
    var asked = request.clone().setSource(name()).setRequestId(Client.idOr(request.getRequestId())).build();
    var reply = noting(() -> client.call(Methods.ROLLBACK, asked));
    return new Snapshot(
        client, reply.getSnapshot(), reply.getUsage(), Map.of(), List.copyOf(reply.getReleasedList()));
  }

  /** Reads the info again. Does not count as use. */
  public Snapshot refresh() {
    var request = GetSnapshotRequest.newBuilder().setName(name()).build();
    info = noting(() -> client.call(Methods.GET_SNAPSHOT, request)).getSnapshot();
    return this;
  }

  /** The prefix as token ids. */
  public List<Integer> tokens() {
    var request = GetSnapshotRequest.newBuilder().setName(name()).setIncludeTokens(true).build();
    return noting(() -> client.call(Methods.GET_SNAPSHOT, request)).getTokenIdsList();
  }

  /** Changes labels, expiration or pinned: those that are set. */
  public Snapshot update(kvfork.v1.Snapshot change) {
    var named = change.toBuilder().setName(name());
    var request = UpdateSnapshotRequest.newBuilder().setSnapshot(named).build();
    info = noting(() -> client.call(Methods.UPDATE_SNAPSHOT, request)).getSnapshot();
    return this;
  }

  /** Drops the name; state shared with others stays. No error if it is gone already. */
  public void delete() {
    client.call(
        Methods.DELETE_SNAPSHOT,
        DeleteSnapshotRequest.newBuilder().setName(name()).setAllowMissing(true).setStopActive(true).build());
  }

  @Override
  public String toString() {
    return name() + " (" + tokenCount() + " tokens)";
  }

  /** Remembers an error that tells the snapshot's end. */
  void noted(KvforkException error) {
    if (error.snapshotIsGone() && (error.resource().isEmpty() || error.resource().equals(name()))) {
      gone = error;
    }
  }

  private <T> T noting(Supplier<T> call) {
    try {
      return call.get();
    } catch (KvforkException error) {
      noted(error);
      throw error;
    }
  }
}
