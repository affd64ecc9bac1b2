package kvfork.client;

import io.grpc.Context;
import io.grpc.Status;
import io.grpc.stub.ClientCalls;
import java.lang.ref.Cleaner;
import java.util.Collections;
import java.util.EnumMap;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.NoSuchElementException;
import java.util.Optional;
import kvfork.v1.Channel;
import kvfork.v1.Delta;
import kvfork.v1.Finished;
import kvfork.v1.GenerateRequest;
import kvfork.v1.GenerateResponse;
import kvfork.v1.Started;
import kvfork.v1.Usage;

/**
 * A running generation: iterate it for the text, {@link #events} for everything, or take the {@link #result}.
 *
 * <p>{@link #close} cancels on the server, so that nobody computes for nobody; a generation that is dropped instead is
 * cancelled when it is collected as garbage. To end it early but keep its receipt and snapshot, call {@link #stop} and
 * read on. One thread reads; {@code stop} and {@code cancel} may come from any.
 */
public final class Generation implements Iterable<Delta>, AutoCloseable {
  private static final Cleaner FORGOTTEN = Cleaner.create();

  private final Client client;
  private final Snapshot source; // null: from scratch
  private final Context.CancellableContext context;
  private final Iterator<GenerateResponse> stream;
  private final Map<Integer, Snapshot> marks = new LinkedHashMap<>();
  private final Map<Channel, StringBuilder> text = new EnumMap<>(Channel.class);
  private volatile Started started;
  private volatile boolean cancelled;
  private Finished finished;
  private Snapshot snapshot;
  private KvforkException error;

  /** A whole generation. {@code text} is the answer; reasoning and tool calls are told apart where they can be. */
  public record Result(
      String text,
      String reasoning,
      String toolCalls,
      Finished finished,
      Optional<Snapshot> snapshot,
      Map<Integer, Snapshot> marks) {
    /** The receipt: prompt_tokens = cached_tokens + recomputed_tokens + new_tokens. */
    public Usage usage() {
      return finished.getUsage();
    }
  }

  Generation(Client client, GenerateRequest request, Snapshot source) {
    this.client = client;
    this.source = source;
    var asked = request.toBuilder();
    if (source != null) {
      asked.setParent(source.name());
    }
    if (request.hasInput()) {
      asked.setInput(Inputs.continued(request.getInput(), asked.getParent()));
    }
    Context.CancellableContext own = Context.current().withCancellation();
    this.context = own;
    Context before = own.attach();
    try {
      stream =
          ClientCalls.blockingServerStreamingCall(client.channel, Methods.GENERATE, client.callOptions(), asked.build());
    } finally {
      own.detach(before);
    }
    FORGOTTEN.register(this, () -> own.cancel(null));
  }

  /** The next event; empty after Finished. Throws the error that ended the stream, however often it is asked. */
  public Optional<GenerateResponse> next() {
    if (error != null) {
      throw error;
    }
    if (finished != null) {
      return Optional.empty();
    }
    GenerateResponse event;
    try {
      event = stream.next();
    } catch (NoSuchElementException none) {
      throw fail(KvforkException.of(Status.Code.INTERNAL, "TRUNCATED", "the stream ended without Finished", none));
    } catch (RuntimeException thrown) {
      throw fail(KvforkException.of(thrown));
    }
    add(event);
    return Optional.of(event);
  }

  /** Everything that the server says. Can be gone through once. */
  public Iterable<GenerateResponse> events() {
    return Events::new;
  }

  /** The text, piece by piece. Can be gone through once. */
  @Override
  public Iterator<Delta> iterator() {
    Events events = new Events();
    return new Iterator<>() {
      private Delta ahead;

      @Override
      public boolean hasNext() {
        while (ahead == null && events.hasNext()) {
          GenerateResponse event = events.next();
          ahead = event.hasDelta() ? event.getDelta() : null;
        }
        return ahead != null;
      }

      @Override
      public Delta next() {
        if (!hasNext()) {
          throw new NoSuchElementException();
        }
        Delta delta = ahead;
        ahead = null;
        return delta;
      }
    };
  }

  /** Reads to the end. */
  public Result result() {
    while (next().isPresent()) {}
    return new Result(
        said(Channel.CHANNEL_UNSPECIFIED),
        said(Channel.CHANNEL_REASONING),
        said(Channel.CHANNEL_TOOL_CALL),
        finished,
        Optional.ofNullable(snapshot),
        marks());
  }

  /**
   * Asks the server to end cleanly: read on, and Finished still comes, with receipt and snapshot. False if it had ended.
   * It can be used once Started was read.
   */
  public boolean stop() {
    if (started == null) {
      throw new IllegalStateException("the generation has no name before Started was read");
    }
    return client.stop(started.getGeneration());
  }

  /** Gives up at once. Nothing more will come. After the end it does nothing. */
  public void cancel() {
    cancelled = true;
    context.cancel(null);
  }

  /** The same as {@link #cancel}. */
  @Override
  public void close() {
    cancel();
  }

  /** What the server said first; null before it was read. */
  public Started started() {
    return started;
  }

  /** Snapshots made so far, by the index of their mark. */
  public Map<Integer, Snapshot> marks() {
    return Collections.unmodifiableMap(marks);
  }

  private void add(GenerateResponse event) {
    switch (event.getEventCase()) {
      case STARTED -> started = event.getStarted();
      case MARKED -> {
        if (event.getMarked().hasSnapshot()) {
          marks.put(event.getMarked().getMark(), new Snapshot(client, event.getMarked().getSnapshot()));
        }
      }
      case DELTA ->
          text.computeIfAbsent(event.getDelta().getChannel(), channel -> new StringBuilder())
              .append(event.getDelta().getText());
      case FINISHED -> {
        finished = event.getFinished();
        if (finished.hasSnapshot()) {
          snapshot = new Snapshot(client, finished.getSnapshot(), finished.getUsage(), Map.of(), java.util.List.of());
        }
        takeStatus();
      }
      default -> {} // progress, or newer than this client
    }
  }

  /** So that the server does not see a cancellation. Finished was whole; a status after it takes nothing back. */
  private void takeStatus() {
    try {
      stream.hasNext();
    } catch (RuntimeException late) {
      return;
    } finally {
      context.cancel(null);
    }
  }

  private String said(Channel channel) {
    StringBuilder said = text.get(channel);
    return said == null ? "" : said.toString();
  }

  private KvforkException fail(KvforkException thrown) {
    error = cancelled ? KvforkException.of(Status.Code.CANCELLED, "", "cancelled by the caller", thrown) : thrown;
    context.cancel(null);
    if (source != null) {
      source.noted(error);
    }
    return error;
  }

  private final class Events implements Iterator<GenerateResponse> {
    private GenerateResponse ahead;

    @Override
    public boolean hasNext() {
      if (ahead == null) {
        ahead = Generation.this.next().orElse(null);
      }
      return ahead != null;
    }

    @Override
    public GenerateResponse next() {
      if (!hasNext()) {
        throw new NoSuchElementException();
      }
      GenerateResponse event = ahead;
      ahead = null;
      return event;
    }
  }
}
