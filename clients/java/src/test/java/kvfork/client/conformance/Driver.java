package kvfork.client.conformance;

import static kvfork.client.Inputs.afterTokens;
import static kvfork.client.Inputs.append;
import static kvfork.client.Inputs.greedy;
import static kvfork.client.Inputs.promptEnd;
import static kvfork.client.Inputs.text;

import com.google.gson.Gson;
import com.google.gson.JsonObject;
import com.google.protobuf.ByteString;
import com.google.protobuf.Duration;
import io.grpc.TlsChannelCredentials;
import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.stream.StreamSupport;
import kvfork.client.Client;
import kvfork.client.Generation;
import kvfork.client.Inputs;
import kvfork.client.KvforkException;
import kvfork.client.Snapshot;
import kvfork.v1.CountTokensRequest;
import kvfork.v1.CreateSnapshotRequest;
import kvfork.v1.Delta;
import kvfork.v1.Finished;
import kvfork.v1.GenerateRequest;
import kvfork.v1.Image;
import kvfork.v1.OutputOptions;
import kvfork.v1.Part;
import kvfork.v1.Release;
import kvfork.v1.RollbackRequest;
import kvfork.v1.Rounding;
import kvfork.v1.Sampling;
import kvfork.v1.SnapshotOptions;
import kvfork.v1.Stopping;
import kvfork.v1.Usage;

/**
 * Plays the scenarios of clients/conformance with the Java client. A scenario comes as one JSON line on stdin, what was
 * seen goes as one JSON line to stdout.
 */
public final class Driver {
  private static final Gson JSON = new Gson();

  private Driver() {}

  private interface Play {
    Map<String, Object> play(Client client, Given given) throws Exception;
  }

  private static final Map<String, Play> PLAYS =
      Map.ofEntries(
          Map.entry("stream", Driver::stream),
          Map.entry("marks", Driver::marks),
          Map.entry("fork", Driver::fork),
          Map.entry("rollback-exact", Driver::rollbackExact),
          Map.entry("rollback-down", Driver::rollbackDown),
          Map.entry("errors", Driver::errors),
          Map.entry("expired", Driver::expired),
          Map.entry("stop", Driver::stop),
          Map.entry("cancel-prefill", Driver::cancelPrefill),
          Map.entry("cancel-decode", Driver::cancelDecode),
          Map.entry("deadline", Driver::deadline),
          Map.entry("save-on-cancel", Driver::saveOnCancel),
          Map.entry("abandoned", Driver::abandoned),
          Map.entry("slow-reader", Driver::slowReader),
          Map.entry("big-message", Driver::bigMessage),
          Map.entry("image", Driver::image),
          Map.entry("retry", Driver::retry),
          Map.entry("socket", Driver::socket),
          Map.entry("secured", Driver::secured),
          Map.entry("drain", Driver::drain));

  /** What a scenario is given. */
  private record Given(JsonObject values) {
    String text(String key) {
      return values.get(key).getAsString();
    }

    int count(String key) {
      return values.get(key).getAsInt();
    }

    double seconds(String key) {
      return values.get(key).getAsDouble();
    }

    String longPrompt() {
      return text("prompt").repeat(count("times"));
    }

    GenerateRequest.Builder on() {
      return GenerateRequest.newBuilder().setSampling(greedy()).setStopping(length(count("max_tokens")));
    }

    GenerateRequest.Builder ask(String prompt) {
      return on().setInput(kvfork.client.Inputs.text(prompt));
    }

    GenerateRequest.Builder ask() {
      return ask(text("prompt"));
    }
  }

  private interface Call {
    void make() throws Exception;
  }

  /** Exactly so many tokens, whatever the model says. */
  private static Stopping length(int count) {
    return Stopping.newBuilder().setMaxTokens(count).setIgnoreEos(true).build();
  }

  private static boolean addsUp(Usage usage) {
    return usage.getCachedTokens() + usage.getRecomputedTokens() + usage.getNewTokens() == usage.getPromptTokens();
  }

  private static boolean join(List<Delta> deltas, int start) {
    for (Delta delta : deltas) {
      if (delta.getFirstPosition() != start) {
        return false;
      }
      start += delta.getTokenCount();
    }
    return true;
  }

  private static KvforkException failure(Call call) throws Exception {
    try {
      call.make();
    } catch (KvforkException error) {
      return error;
    }
    throw new AssertionError("the call was to fail");
  }

  private static Map<String, Object> seen(Object... pairs) {
    Map<String, Object> seen = new LinkedHashMap<>();
    for (int index = 0; index < pairs.length; index += 2) {
      seen.put((String) pairs[index], pairs[index + 1]);
    }
    return seen;
  }

  private static Map<String, Object> told(KvforkException error) {
    return seen("code", error.code().name(), "reason", error.reasonName());
  }

  private static Map<String, Object> with(Map<String, Object> told, Object... more) {
    told.putAll(seen(more));
    return told;
  }

  private static String reason(Finished finished) {
    return finished.getReason().name().substring("FINISH_REASON_".length());
  }

  /** Reads so many, and leaves the generation running. */
  private static List<Delta> firstDeltas(Generation generation, int count) {
    List<Delta> deltas = new ArrayList<>();
    while (deltas.size() < count) {
      var event = generation.next().orElseThrow();
      if (event.hasDelta()) {
        deltas.add(event.getDelta());
      }
    }
    return deltas;
  }

  private static Map<String, Object> stream(Client client, Given given) {
    try (Generation generation = client.generate(given.ask().build())) {
      List<String> kinds = new ArrayList<>();
      List<Delta> deltas = new ArrayList<>();
      for (var event : generation.events()) {
        String kind = event.getEventCase().name().toLowerCase(java.util.Locale.ROOT);
        if (kinds.isEmpty() || !kinds.get(kinds.size() - 1).equals(kind)) {
          kinds.add(kind);
        }
        if (event.hasDelta()) {
          deltas.add(event.getDelta());
        }
      }
      var result = generation.result();
      String sum = deltas.stream().map(Delta::getText).reduce("", String::concat);
      return seen(
          "events", kinds,
          "reason", reason(result.finished()),
          "completion_tokens", result.usage().getCompletionTokens(),
          "text", result.text(),
          "text_is_sum_of_deltas", sum.equals(result.text()),
          "positions_join", join(deltas, generation.started().getPromptTokens()),
          "receipt_adds_up", addsUp(result.usage()));
    }
  }

  private static Map<String, Object> marks(Client client, Given given) {
    var request =
        given.ask().addMarks(promptEnd()).addMarks(afterTokens(given.count("mark_at"))).setSave(SnapshotOptions.newBuilder());
    Generation generation = client.generate(request.build());
    var result = generation.result();
    var again = result.marks().get(0).generate(given.on().build()).result();
    int prompt = generation.started().getPromptTokens();
    int whole = prompt + result.usage().getCompletionTokens();
    return seen(
        "marks", result.marks().size(),
        "first_is_prompt_end", result.marks().get(0).tokenCount() == prompt,
        "second_tokens", result.marks().get(1).tokenCount(),
        "saved_is_prompt_and_answer", result.snapshot().orElseThrow().tokenCount() == whole,
        "same_text_from_prompt_end", again.text().equals(result.text()),
        "recomputed_tokens", again.usage().getRecomputedTokens());
  }

  private static Snapshot create(Client client, String prompt) {
    return client.createSnapshot(CreateSnapshotRequest.newBuilder().setInput(text(prompt)).build());
  }

  private static Map<String, Object> fork(Client client, Given given) throws Exception {
    Snapshot source = create(client, given.text("prompt"));
    var branches =
        StreamSupport.stream(given.values().getAsJsonArray("appends").spliterator(), false)
            .map(one -> append(text(one.getAsString())))
            .toList();
    List<Snapshot> children = source.fork(branches);
    List<Generation.Result> results = new ArrayList<>();
    var pool = Executors.newCachedThreadPool();
    try {
      List<Future<Generation.Result>> running = new ArrayList<>();
      for (Snapshot child : children) {
        running.add(pool.submit(() -> child.generate(given.on().build()).result()));
      }
      for (var one : running) {
        results.add(one.get());
      }
    } finally {
      pool.shutdown();
    }
    List<Snapshot> copies = source.fork(2);
    List<Integer> own = source.tokens();
    return seen(
        "children", children.size(),
        "distinct_names", children.stream().map(Snapshot::name).distinct().count(),
        "parents_are_the_source", children.stream().allMatch(child -> child.info().getParent().equals(source.name())),
        "finished", results.size(),
        "completion_tokens", results.stream().mapToInt(result -> result.usage().getCompletionTokens()).sum(),
        "receipts_add_up",
            addsUp(children.get(0).usage()) && results.stream().allMatch(result -> addsUp(result.usage())),
        "plain_copies", copies.size(),
        "copies_have_its_tokens", copies.stream().allMatch(copy -> copy.tokens().equals(own)));
  }

  private static Map<String, Object> rollbackExact(Client client, Given given) throws Exception {
    var request = given.ask(given.longPrompt()).addMarks(promptEnd()).setSave(SnapshotOptions.newBuilder());
    var result = client.generate(request.build()).result();
    Snapshot end = result.snapshot().orElseThrow();
    Snapshot mark = result.marks().get(0);
    Snapshot cut = end.rollbackTo(mark.tokenCount());
    var again = cut.generate(given.on().build()).result();
    Snapshot dropped = end.drop(3);
    Snapshot ancestor = end.rollback(RollbackRequest.newBuilder().setAncestor(mark.name()));
    KvforkException beyond = failure(() -> end.rollbackTo(end.tokenCount() + 1));
    Snapshot last =
        dropped.rollback(RollbackRequest.newBuilder().setDropTokens(1).setRelease(Release.RELEASE_SOURCE));
    boolean toldCount = String.valueOf(end.tokenCount()).equals(beyond.metadata().get("tokenCount"));
    return seen(
        "cut_at_prompt", cut.tokenCount() == mark.tokenCount(),
        "same_text_again", again.text().equals(result.text()),
        "dropped_three", dropped.tokenCount() == end.tokenCount() - 3,
        "to_ancestor", ancestor.tokenCount() == mark.tokenCount(),
        "released_source", last.released().equals(List.of(dropped.name())),
        "beyond_end", with(told(beyond), "told_token_count", toldCount));
  }

  private static Map<String, Object> rollbackDown(Client client, Given given) {
    Snapshot source = create(client, given.longPrompt());
    Snapshot back =
        source.rollback(
            RollbackRequest.newBuilder().setTokenCount(given.count("cut_at")).setRounding(Rounding.ROUNDING_DOWN));
    return seen(
        "token_count", back.tokenCount(),
        "recomputed_tokens", back.usage().getRecomputedTokens(),
        "new_tokens", back.usage().getNewTokens());
  }

  private static Map<String, Object> errors(Client client, Given given) throws Exception {
    var wrong =
        GenerateRequest.newBuilder()
            .setInput(text("Hi"))
            .setSampling(Sampling.newBuilder().setTemperature(-1).setTopP(2));
    KvforkException fields = failure(() -> client.generate(wrong.build()).result());
    KvforkException snapshot = failure(() -> client.getSnapshot(given.text("missing")));
    KvforkException model = failure(() -> client.model(given.text("model")));
    var words = GenerateRequest.newBuilder().setInput(text("word ".repeat(given.count("too_many_words"))));
    KvforkException tooLong = failure(() -> client.generate(words.build()).result());
    List<String> paths = fields.fields().stream().map(KvforkException.FieldViolation::path).sorted().toList();
    return seen(
        "fields", with(told(fields), "fields", paths),
        "snapshot",
            with(told(snapshot), "resource", snapshot.resource(), "snapshot_is_gone", snapshot.snapshotIsGone()),
        "model", with(told(model), "resource", model.resource(), "snapshot_is_gone", model.snapshotIsGone()),
        "too_long", with(told(tooLong), "metadata", tooLong.metadata().keySet().stream().sorted().toList()));
  }

  private static Map<String, Object> expired(Client client, Given given) throws Exception {
    var options = SnapshotOptions.newBuilder().setTtl(Duration.newBuilder().setSeconds(given.count("ttl_seconds")));
    Snapshot snapshot =
        client.createSnapshot(
            CreateSnapshotRequest.newBuilder().setInput(text(given.text("prompt"))).setOptions(options).build());
    sleep(given.seconds("wait_seconds"));
    Generation generation = snapshot.generate(GenerateRequest.newBuilder().setStopping(length(4)).build());
    List<Object> events = new ArrayList<>();
    KvforkException error = failure(() -> generation.events().forEach(events::add));
    return with(
        told(error),
        "told_expire_time", error.metadata().containsKey("expireTime"),
        "events_before", events.size(),
        "handle_knows", snapshot.gone() == error);
  }

  private static Map<String, Object> stop(Client client, Given given) {
    Generation generation = client.generate(given.ask().setSave(SnapshotOptions.newBuilder()).build());
    firstDeltas(generation, given.count("after_deltas"));
    boolean running = generation.stop();
    var result = generation.result();
    int total = generation.started().getPromptTokens() + result.usage().getCompletionTokens();
    return seen(
        "was_running", running,
        "reason", reason(result.finished()),
        "snapshot_holds_all", result.snapshot().orElseThrow().tokenCount() == total,
        "receipt_adds_up", addsUp(result.usage()),
        "was_running_later", client.stop(generation.started().getGeneration()));
  }

  private static Map<String, Object> cancelPrefill(Client client, Given given) throws Exception {
    var request = given.ask(given.longPrompt()).setOutput(OutputOptions.newBuilder().setProgress(true));
    int deltas = 0;
    Generation generation = client.generate(request.build());
    try (generation) {
      for (var event : generation.events()) {
        if (event.hasProgress() && event.getProgress().getDoneTokens() < event.getProgress().getTotalTokens()) {
          break;
        }
        deltas += event.hasDelta() ? 1 : 0;
      }
    }
    return seen("code", failure(generation::result).code().name(), "deltas", deltas);
  }

  private static Map<String, Object> cancelDecode(Client client, Given given) throws Exception {
    Generation generation = client.generate(given.ask().build());
    List<Delta> deltas = firstDeltas(generation, given.count("after_deltas"));
    generation.cancel();
    return seen("code", failure(generation::result).code().name(), "deltas", deltas.size());
  }

  private static Map<String, Object> deadline(Client client, Given given) throws Exception {
    Client hurried = client.withTimeout(java.time.Duration.ofMillis((long) (given.seconds("timeout_seconds") * 1000)));
    List<Delta> deltas = new ArrayList<>();
    Generation generation = hurried.generate(given.ask().build());
    KvforkException error = failure(() -> generation.forEach(deltas::add));
    return seen("code", error.code().name(), "some_deltas", !deltas.isEmpty());
  }

  private static Map<String, Object> saveOnCancel(Client client, Given given) throws Exception {
    String id = given.text("snapshot_id");
    var request = given.ask().setSave(SnapshotOptions.newBuilder().setSnapshotId(id)).setSaveOnCancel(true);
    Generation generation = client.generate(request.build());
    firstDeltas(generation, given.count("after_deltas"));
    generation.cancel();
    KvforkException ended = failure(generation::result);
    Snapshot kept = null;
    while (kept == null) { // it is there a moment after the call has ended
      try {
        kept = client.getSnapshot("snapshots/" + id);
      } catch (KvforkException error) {
        if (!error.snapshotIsGone()) {
          throw error;
        }
        sleep(0.05);
      }
    }
    var more = kept.generate(GenerateRequest.newBuilder().setStopping(length(2)).build()).result();
    return seen(
        "code", ended.code().name(),
        "longer_than_prompt", kept.tokenCount() > generation.started().getPromptTokens(),
        "goes_on", more.usage().getCompletionTokens() == 2);
  }

  private static Map<String, Object> abandoned(Client client, Given given) throws Exception {
    readOneAndForget(client, given);
    for (int turn = 0; turn < 5; turn++) {
      System.gc();
      sleep(0.02);
    }
    return seen("dropped", true);
  }

  private static void readOneAndForget(Client client, Given given) {
    firstDeltas(client.generate(given.ask().build()), 1);
  }

  private static Map<String, Object> slowReader(Client client, Given given) throws Exception {
    Generation generation = client.generate(given.ask().build());
    List<Delta> deltas = firstDeltas(generation, 1);
    sleep(given.seconds("pause_seconds"));
    generation.forEach(deltas::add);
    var result = generation.result();
    return seen(
        "text", result.text(),
        "tokens_in_deltas", deltas.stream().mapToInt(Delta::getTokenCount).sum(),
        "completion_tokens", result.usage().getCompletionTokens(),
        "positions_join", join(deltas, generation.started().getPromptTokens()));
  }

  private static Map<String, Object> bigMessage(Client client, Given given) throws Exception {
    String words = given.text("word").repeat(given.count("words"));
    var counted =
        client.countTokens(CountTokensRequest.newBuilder().setInput(text(words)).setIncludeRendered(true).build());
    String tooMany = given.text("word").repeat(given.count("too_many_words"));
    KvforkException over =
        failure(() -> client.countTokens(CountTokensRequest.newBuilder().setInput(text(tooMany)).build()));
    return seen(
        "text_came_back", counted.getText().endsWith(words),
        "reply_over_4_mib", counted.getText().length() > 4 << 20,
        "over_limit", told(over));
  }

  private static Map<String, Object> image(Client unused, Given given) throws Exception {
    byte[] file = Base64.getDecoder().decode(given.text("png_base64"));
    Part words = Inputs.textPart(given.text("words_before"));
    try (Client client = Client.connect(given.text("peer"))) {
      var showing = CreateSnapshotRequest.newBuilder().setInput(Inputs.raw(words, Inputs.image(file)));
      Snapshot kept = client.createSnapshot(showing.build());
      var digest = ByteString.copyFrom(MessageDigest.getInstance("SHA-256").digest(file));
      Part known = Part.newBuilder().setImage(Image.newBuilder().setSha256(digest)).build();
      var again = client.countTokens(CountTokensRequest.newBuilder().setInput(Inputs.raw(words, known)).build());
      var result = kept.generate(given.ask(given.text("question")).build()).result();
      byte[] nothing = "no picture".getBytes(StandardCharsets.UTF_8);
      var wrong = CreateSnapshotRequest.newBuilder().setInput(Inputs.raw(Inputs.image(nothing)));
      KvforkException no = failure(() -> client.createSnapshot(wrong.build()));
      return seen(
          "spans", kept.info().getImageSpansCount(),
          "image_tokens_counted", kept.usage().getImageTokens() > 0,
          "known_by_digest", again.getTotalTokens() == kept.tokenCount(),
          "recomputed_tokens", result.usage().getRecomputedTokens(),
          "completion_tokens", result.usage().getCompletionTokens(),
          "no_picture", told(no));
    }
  }

  private static Map<String, Object> retry(Client unused, Given given) throws Exception {
    try (Client client = Client.connect(given.text("peer"))) {
      var request = GenerateRequest.newBuilder().setInput(text(given.text("prompt"))).build();
      var before = client.generate(request).result();
      List<Object> events = new ArrayList<>();
      Generation begun = client.generate(request);
      KvforkException after = failure(() -> begun.events().forEach(events::add));
      KvforkException no = failure(() -> client.generate(request).result());
      var made = client.snapshot("snapshots/source").fork(2);
      return seen(
          "before_started", before.text(),
          "after_started", seen("code", after.code().name(), "events", events.size()),
          "told_not_to", told(no),
          "fork", made.size());
    }
  }

  private static Map<String, Object> socket(Client client, Given given) {
    try (Client other = Client.to(given.text("socket")).token(given.text("token")).build()) {
      return seen("same_instance", other.serverInfo().getInstance().equals(client.serverInfo().getInstance()));
    }
  }

  private static Map<String, Object> secured(Client unused, Given given) throws Exception {
    String peer = given.text("peer");
    var trusting = TlsChannelCredentials.newBuilder().trustManager(new File(given.text("ca"))).build();
    String instance;
    try (Client known = Client.to(peer).tls(trusting).token(given.text("token")).build()) {
      instance = known.serverInfo().getInstance();
    }
    KvforkException without;
    try (Client stranger = Client.to(peer).tls(trusting).build()) {
      without = failure(stranger::serverInfo);
    }
    KvforkException unknown;
    try (Client nobody = Client.to(peer).tls(trusting).token(given.text("unknown_token")).build()) {
      unknown = failure(nobody::serverInfo);
    }
    KvforkException other;
    try (Client wary = Client.to(peer).tls(TlsChannelCredentials.create()).retry(false).build()) {
      other = failure(wary::serverInfo);
    }
    boolean refused = false;
    try {
      Client.to("example.org:443").token(given.text("token")).build().close();
    } catch (IllegalArgumentException inTheClear) {
      refused = true;
    }
    return seen(
        "with_token", !instance.isEmpty(),
        "without_token", told(without),
        "unknown_token", told(unknown),
        "other_roots", other.code().name(),
        "token_in_clear_refused", refused);
  }

  private static Map<String, Object> drain(Client client, Given given) throws Exception {
    Generation generation = client.generate(given.ask().setSave(SnapshotOptions.newBuilder()).build());
    firstDeltas(generation, 1);
    try (Client impatient = Client.to(given.text("address")).retry(false).build()) {
      while (!impatient.serverInfo().getDraining()) {
        sleep(0.02);
      }
      KvforkException refused = failure(() -> impatient.generate(given.ask().build()).result());
      var result = generation.result();
      return seen(
          "new_call", told(refused),
          "running_ended", reason(result.finished()),
          "snapshot_made", result.snapshot().isPresent());
    }
  }

  private static void sleep(double seconds) throws InterruptedException {
    Thread.sleep((long) (seconds * 1000));
  }

  public static void main(String[] arguments) throws Exception {
    var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    try (Client client = Client.to(arguments[0]).timeout(java.time.Duration.ofMinutes(10)).build()) {
      for (String line = lines.readLine(); line != null; line = lines.readLine()) {
        JsonObject asked = JSON.fromJson(line, JsonObject.class);
        String scenario = asked.get("scenario").getAsString();
        Map<String, Object> told = seen("scenario", scenario);
        Play play = PLAYS.get(scenario);
        if (play == null) {
          told.put("error", "this driver does not know the scenario");
        } else {
          try {
            told.put("observed", play.play(client, new Given(asked.getAsJsonObject("given"))));
          } catch (Exception | AssertionError error) {
            StringWriter trace = new StringWriter();
            error.printStackTrace(new PrintWriter(trace));
            told.put("error", trace.toString());
          }
        }
        System.out.write((JSON.toJson(told) + "\n").getBytes(StandardCharsets.UTF_8));
        System.out.flush();
      }
    }
  }
}
