package kvfork.client.examples;

import static kvfork.client.Inputs.append;
import static kvfork.client.Inputs.greedy;
import static kvfork.client.Inputs.maxTokens;
import static kvfork.client.Inputs.text;

import java.util.List;
import kvfork.client.Client;
import kvfork.client.Snapshot;
import kvfork.v1.CreateSnapshotRequest;
import kvfork.v1.GenerateRequest;
import kvfork.v1.Release;
import kvfork.v1.RollbackRequest;

/** One beginning, three endings, and back to the beginning. */
public final class ForkAndRollback {
  private static final String BEGINNING =
      "The lighthouse keeper climbed the stairs for the last time, opened the door and saw";
  private static final List<String> ENDINGS = List.of(" a ship", " the sunrise", " nothing");

  private ForkAndRollback() {}

  public static void main(String[] arguments) {
    try (Client client = Client.connect(arguments.length > 0 ? arguments[0] : "127.0.0.1:50051")) {
      Snapshot start = client.createSnapshot(CreateSnapshotRequest.newBuilder().setInput(text(BEGINNING)).build());
      List<Snapshot> branches = start.fork(ENDINGS.stream().map(ending -> append(text(ending))).toList());
      // Side by side: the server decodes them together.
      List<String> stories = branches.parallelStream().map(ForkAndRollback::rest).toList();
      for (int index = 0; index < stories.size(); index++) {
        System.out.printf("…%s%s%n%n", ENDINGS.get(index), stories.get(index));
      }

      // The first branch is not needed any more: back to where it left the others, and let its name go.
      Snapshot again =
          branches
              .get(0)
              .rollback(
                  RollbackRequest.newBuilder()
                      .setTokenCount(start.tokenCount())
                      .setRelease(Release.RELEASE_SOURCE));
      System.out.printf(
          "rolled back to %d tokens, %d recomputed%n…%s%n",
          again.tokenCount(), again.usage().getRecomputedTokens(), rest(again));
      for (Snapshot snapshot : List.of(again, branches.get(1), branches.get(2), start)) {
        snapshot.delete();
      }
    }
  }

  /** How a story goes on, with the receipt of getting there. */
  private static String rest(Snapshot branch) {
    var request = GenerateRequest.newBuilder().setSampling(greedy()).setStopping(maxTokens(24)).build();
    try (var generation = branch.generate(request)) {
      var result = generation.result();
      var usage = result.usage();
      return String.format(
          "%s%n  [restored %d, recomputed %d, new %d]",
          result.text(), usage.getCachedTokens(), usage.getRecomputedTokens(), usage.getNewTokens());
    }
  }
}
