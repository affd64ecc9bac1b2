// One beginning, three endings, and back to the beginning: go run ./examples/fork_and_rollback [ADDRESS]
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"sync"

	kvfork "kvfork.example/go"
	pb "kvfork.example/go/kvforkv1"
)

const beginning = "The lighthouse keeper climbed the stairs for the last time, opened the door and saw"

var endings = []string{" a ship", " the sunrise", " nothing"}

func main() {
	address := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	client, err := kvfork.Dial(address)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	if err := tell(context.Background(), client); err != nil {
		log.Fatal(err)
	}
}

func tell(ctx context.Context, client *kvfork.Client) error {
	start, err := client.CreateSnapshot(ctx, &pb.CreateSnapshotRequest{Input: kvfork.Text(beginning)})
	if err != nil {
		return err
	}
	defer start.Delete(ctx)

	var branches []*pb.ForkBranch
	for _, ending := range endings {
		branches = append(branches, kvfork.Append(kvfork.Text(ending)))
	}
	children, err := start.ForkInto(ctx, branches...)
	if err != nil {
		return err
	}
	stories := make([]string, len(children))
	var all sync.WaitGroup // the server decodes them together
	for index, child := range children {
		all.Go(func() { stories[index] = rest(ctx, child) })
	}
	all.Wait()
	for index, story := range stories {
		fmt.Printf("…%s%s\n\n", endings[index], story)
	}

	// The first branch is not needed any more: back to where it left the others, and let its name go.
	again, err := children[0].Rollback(ctx, kvfork.ToTokens(start.TokenCount()), kvfork.Release(pb.Release_RELEASE_SOURCE))
	if err != nil {
		return err
	}
	fmt.Printf("rolled back to %d tokens, %d recomputed\n…%s\n",
		again.TokenCount(), again.Usage.RecomputedTokens, rest(ctx, again))
	for _, snapshot := range append(children[1:], again) {
		if err := snapshot.Delete(ctx); err != nil {
			return err
		}
	}
	return nil
}

// rest is how a story goes on, with the receipt of getting there.
func rest(ctx context.Context, branch *kvfork.Snapshot) string {
	request := &pb.GenerateRequest{Sampling: kvfork.Greedy(), Stopping: kvfork.MaxTokens(24)}
	result, err := branch.Generate(ctx, request).Result()
	if err != nil {
		return err.Error()
	}
	usage := result.Usage()
	return fmt.Sprintf("%s\n  [restored %d, recomputed %d, new %d]",
		result.Text, usage.CachedTokens, usage.RecomputedTokens, usage.NewTokens)
}
