package kvfork.client;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ChannelCredentials;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.ClientCalls;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.NoSuchElementException;
import java.util.Queue;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import kvfork.v1.CacheStats;
import kvfork.v1.CountTokensRequest;
import kvfork.v1.CountTokensResponse;
import kvfork.v1.CreateSnapshotRequest;
import kvfork.v1.ExtendSnapshotsRequest;
import kvfork.v1.ExtendSnapshotsResponse;
import kvfork.v1.GenerateRequest;
import kvfork.v1.GetCacheStatsRequest;
import kvfork.v1.GetModelRequest;
import kvfork.v1.GetServerInfoRequest;
import kvfork.v1.GetServerInfoResponse;
import kvfork.v1.GetSnapshotRequest;
import kvfork.v1.ListSnapshotsRequest;
import kvfork.v1.ListSnapshotsResponse;
import kvfork.v1.Model;
import kvfork.v1.StopGenerationRequest;
import kvfork.v1.WatchSnapshotsRequest;
import kvfork.v1.WatchSnapshotsResponse;

/** A connection to one server. Safe to share between threads. Calls throw {@link KvforkException}. */
public final class Client implements AutoCloseable {
  final ManagedChannel channel;
  private final CallOptions options;
  private final Duration timeout; // null: none

  Client(ManagedChannel channel, CallOptions options, Duration timeout) {
    this.channel = channel;
    this.options = options;
    this.timeout = timeout;
  }

  /** To {@code host:port} or {@code unix:/path}, in plaintext. It connects when it is first used. */
  public static Client connect(String address) {
    return to(address).build();
  }

  /** With settings: token, TLS, timeout, retry. */
  public static Builder to(String address) {
    return new Builder(address);
  }

  /** Settings of a client. */
  public static final class Builder {
    private final Connecting connecting;
    private Duration timeout;

    private Builder(String address) {
      this.connecting = new Connecting(address);
    }

    /** Sends a bearer token with every call. Off this machine it needs {@link #tls}. */
    public Builder token(String token) {
      connecting.token = token;
      return this;
    }

    /** Lets the token cross a network without TLS, for one that is trusted. */
    public Builder tokenInClear() {
      connecting.tokenInClear = true;
      return this;
    }

    /** Encrypts. {@code TlsChannelCredentials.create()} checks the server against Java's own roots. */
    public Builder tls(ChannelCredentials credentials) {
      connecting.tls = credentials;
      return this;
    }

    /** For every call: what is not over by then ends with DEADLINE_EXCEEDED. */
    public Builder timeout(Duration timeout) {
      this.timeout = timeout;
      return this;
    }

    /**
     * Whether calls that found the server unavailable are made again, up to four tries, before any reply began. They
     * are, by default.
     */
    public Builder retry(boolean retry) {
      connecting.retry = retry;
      return this;
    }

    /** The client. Throws IllegalArgumentException for an address or a combination that cannot be used. */
    public Client build() {
      ManagedChannel channel = connecting.open();
      return new Client(channel, connecting.callOptions(), timeout);
    }
  }

  /**
   * The same connection with another timeout for its calls. A deadline loses the end of a stream, {@code
   * Stopping.time_limit} does not.
   */
  public Client withTimeout(Duration timeout) {
    return new Client(channel, options, timeout);
  }

  /** Cancels what runs and closes the connection. Snapshots stay on the server. */
  @Override
  public void close() {
    channel.shutdownNow();
  }

  /** Starts a generation. Errors come out of the returned object, the first time it is read. */
  public Generation generate(GenerateRequest request) {
    return new Generation(this, request, null);
  }

  /** Prefills an input and names the result; {@link Snapshot#marks} has the snapshots of its marks. */
  public Snapshot createSnapshot(CreateSnapshotRequest request) {
    var asked = request.toBuilder().setRequestId(idOr(request.getRequestId()));
    if (request.hasInput()) {
      asked.setInput(Inputs.continued(request.getInput(), request.getParent()));
    }
    var reply = call(Methods.CREATE_SNAPSHOT, asked.build());
    Map<Integer, Snapshot> marks = new LinkedHashMap<>();
    reply.getMarkedList().forEach(info -> marks.put(marks.size(), new Snapshot(this, info)));
    return new Snapshot(this, reply.getSnapshot(), reply.getUsage(), marks, java.util.List.of());
  }

  /** A handle for a name known from elsewhere. Asks the server nothing: its info has the name alone. */
  public Snapshot snapshot(String name) {
    return new Snapshot(this, kvfork.v1.Snapshot.newBuilder().setName(name).build());
  }

  /** Looks a snapshot up. */
  public Snapshot getSnapshot(String name) {
    var request = GetSnapshotRequest.newBuilder().setName(name).build();
    return new Snapshot(this, call(Methods.GET_SNAPSHOT, request).getSnapshot());
  }

  /** The caller's snapshots, oldest first, page after page as they are needed. */
  public Iterable<Snapshot> listSnapshots(ListSnapshotsRequest request) {
    return () -> new Pages(request);
  }

  /** Gives up to 1000 snapshots more time. Missing names are told in the reply, and no error. */
  public ExtendSnapshotsResponse extendSnapshots(ExtendSnapshotsRequest request) {
    return call(Methods.EXTEND_SNAPSHOTS, request);
  }

  /**
   * Follows changes until {@code seen} throws or the thread is interrupted: first what there is, then Synced, then what
   * happens.
   */
  public void watchSnapshots(WatchSnapshotsRequest request, Consumer<WatchSnapshotsResponse> seen) {
    Context.CancellableContext context = Context.current().withCancellation();
    Context before = context.attach();
    try {
      ClientCalls.blockingServerStreamingCall(channel, Methods.WATCH_SNAPSHOTS, callOptions(), request)
          .forEachRemaining(seen);
    } catch (StatusRuntimeException error) {
      throw KvforkException.of(error);
    } finally {
      context.detach(before);
      context.cancel(null);
    }
  }

  /** Ends a generation by its name, cleanly. False if it had ended already. */
  public boolean stop(String generation) {
    var request = StopGenerationRequest.newBuilder().setGeneration(generation).build();
    return call(Methods.STOP_GENERATION, request).getWasRunning();
  }

  /** Renders and tokenizes without running the model. */
  public CountTokensResponse countTokens(CountTokensRequest request) {
    var asked = request.toBuilder();
    if (request.hasInput()) {
      asked.setInput(Inputs.continued(request.getInput(), request.getParent()));
    }
    return call(Methods.COUNT_TOKENS, asked.build());
  }

  /** Versions, limits and features. */
  public GetServerInfoResponse serverInfo() {
    return call(Methods.GET_SERVER_INFO, GetServerInfoRequest.getDefaultInstance());
  }

  /** One model; an empty name means the only one. */
  public Model model(String name) {
    return call(Methods.GET_MODEL, GetModelRequest.newBuilder().setName(name).build()).getModel();
  }

  /** Scheduler, memory and store in numbers. */
  public CacheStats cacheStats() {
    return call(Methods.GET_CACHE_STATS, GetCacheStatsRequest.getDefaultInstance()).getStats();
  }

  <Q, R> R call(MethodDescriptor<Q, R> method, Q request) {
    try {
      return ClientCalls.blockingUnaryCall((Channel) channel, method, callOptions(), request);
    } catch (StatusRuntimeException error) {
      throw KvforkException.of(error);
    }
  }

  CallOptions callOptions() {
    return timeout == null ? options : options.withDeadlineAfter(timeout.toNanos(), TimeUnit.NANOSECONDS);
  }

  /** A call with an id returns what it made, however often it is repeated. */
  static String idOr(String given) {
    return given.isEmpty() ? UUID.randomUUID().toString() : given;
  }

  private final class Pages implements Iterator<Snapshot> {
    private final Queue<kvfork.v1.Snapshot> page = new ArrayDeque<>();
    private ListSnapshotsRequest next; // null: there are no more pages

    Pages(ListSnapshotsRequest first) {
      next = first;
    }

    @Override
    public boolean hasNext() {
      while (page.isEmpty() && next != null) {
        ListSnapshotsResponse reply = call(Methods.LIST_SNAPSHOTS, next);
        page.addAll(reply.getSnapshotsList());
        String token = reply.getNextPageToken();
        next = token.isEmpty() ? null : next.toBuilder().setPageToken(token).build();
      }
      return !page.isEmpty();
    }

    @Override
    public Snapshot next() {
      if (!hasNext()) {
        throw new NoSuchElementException();
      }
      return new Snapshot(Client.this, page.remove());
    }
  }
}
