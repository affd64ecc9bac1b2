// Plays the scenarios of clients/conformance with the Go client: conformance ADDRESS. A scenario comes as one JSON line
// on stdin, what was seen goes as one JSON line to stdout.
package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	kvfork "kvfork.example/go"
	pb "kvfork.example/go/kvforkv1"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
)

type given struct {
	Address, Peer, Prompt, Missing, Model, Word, CA, Token, Socket, Question string
	Times                                                                    int
	Appends                                                                  []string
	MaxTokens                                                                int     `json:"max_tokens"`
	MarkAt                                                                   int     `json:"mark_at"`
	CutAt                                                                    int     `json:"cut_at"`
	AfterDeltas                                                              int     `json:"after_deltas"`
	Words                                                                    int     `json:"words"`
	TooManyWords                                                             int     `json:"too_many_words"`
	TTLSeconds                                                               int64   `json:"ttl_seconds"`
	WaitSeconds                                                              float64 `json:"wait_seconds"`
	PauseSeconds                                                             float64 `json:"pause_seconds"`
	TimeoutSeconds                                                           float64 `json:"timeout_seconds"`
	UnknownToken                                                             string  `json:"unknown_token"`
	WordsBefore                                                              string  `json:"words_before"`
	PNG                                                                      []byte  `json:"png_base64"`
	SnapshotID                                                               string  `json:"snapshot_id"`
}

type seen = map[string]any

type play func(context.Context, *kvfork.Client, given) (seen, error)

var plays = map[string]play{
	"stream": stream, "marks": marks, "fork": fork, "rollback-exact": rollbackExact, "rollback-down": rollbackDown,
	"errors": failures, "expired": expired, "stop": stop, "cancel-prefill": cancelPrefill, "cancel-decode": cancelDecode,
	"deadline": deadline, "save-on-cancel": saveOnCancel, "abandoned": abandoned, "slow-reader": slowReader,
	"big-message": bigMessage, "image": image, "retry": retry, "socket": socket, "secured": secured, "drain": drain,
}

// ask is a request for exactly as many tokens as are given, whatever the model says.
func ask(g given, text string) *pb.GenerateRequest {
	return &pb.GenerateRequest{Input: kvfork.Text(text), Sampling: kvfork.Greedy(), Stopping: length(g.MaxTokens)}
}

func length(count int) *pb.Stopping {
	stopping := kvfork.MaxTokens(count)
	stopping.IgnoreEos = true
	return stopping
}

func addsUp(usage *pb.Usage) bool {
	return usage != nil && usage.CachedTokens+usage.RecomputedTokens+usage.NewTokens == usage.PromptTokens
}

func join(deltas []*pb.Delta, start uint32) bool {
	for _, delta := range deltas {
		if delta.FirstPosition != start {
			return false
		}
		start += delta.TokenCount
	}
	return true
}

func seconds(count float64) time.Duration { return time.Duration(count * float64(time.Second)) }

// names of codes as the contract writes them.
var names = map[codes.Code]string{
	codes.Canceled: "CANCELLED", codes.InvalidArgument: "INVALID_ARGUMENT", codes.NotFound: "NOT_FOUND",
	codes.DeadlineExceeded: "DEADLINE_EXCEEDED", codes.OutOfRange: "OUT_OF_RANGE", codes.Unavailable: "UNAVAILABLE",
	codes.ResourceExhausted: "RESOURCE_EXHAUSTED", codes.Unauthenticated: "UNAUTHENTICATED",
}

func code(err error) string {
	failed := kvfork.AsError(err)
	if failed == nil {
		return "OK"
	}
	if name, ok := names[failed.Code]; ok {
		return name
	}
	return failed.Error()
}

func told(err error) seen {
	failed := kvfork.AsError(err)
	if failed == nil {
		return seen{"code": "OK"}
	}
	return seen{"code": code(err), "reason": string(failed.Reason)}
}

func reason(finished *pb.Finished) string {
	return strings.TrimPrefix(finished.GetReason().String(), "FINISH_REASON_")
}

// firstDeltas reads so many, and leaves the generation running.
func firstDeltas(g *kvfork.Generation, count int) ([]*pb.Delta, error) {
	var deltas []*pb.Delta
	for len(deltas) < count {
		event, err := g.Next()
		if err != nil {
			return nil, err
		}
		if delta := event.GetDelta(); delta != nil {
			deltas = append(deltas, delta)
		}
	}
	return deltas, nil
}

func stream(ctx context.Context, c *kvfork.Client, g given) (seen, error) {
	generation := c.Generate(ctx, ask(g, g.Prompt))
	var kinds []string
	var deltas []*pb.Delta
	var text strings.Builder
	for event, err := range generation.Events() {
		if err != nil {
			return nil, err
		}
		kind := "other"
		switch event := event.Event.(type) {
		case *pb.GenerateResponse_Started:
			kind = "started"
		case *pb.GenerateResponse_Delta:
			kind = "delta"
			deltas = append(deltas, event.Delta)
			text.WriteString(event.Delta.Text)
		case *pb.GenerateResponse_Finished:
			kind = "finished"
		}
		kinds = append(kinds, kind)
	}
	result, err := generation.Result()
	if err != nil {
		return nil, err
	}
	return seen{
		"events": slices.Compact(kinds), "reason": reason(result.Finished),
		"completion_tokens": result.Usage().CompletionTokens, "text": result.Text,
		"text_is_sum_of_deltas": text.String() == result.Text,
		"positions_join":        join(deltas, generation.Started().PromptTokens),
		"receipt_adds_up":       addsUp(result.Usage()),
	}, nil
}

func marks(ctx context.Context, c *kvfork.Client, g given) (seen, error) {
	request := ask(g, g.Prompt)
	request.Marks = []*pb.Mark{kvfork.PromptEnd(), kvfork.AfterTokens(g.MarkAt)}
	request.Save = &pb.SnapshotOptions{}
	generation := c.Generate(ctx, request)
	result, err := generation.Result()
	if err != nil {
		return nil, err
	}
	again, err := result.Marks[0].Generate(ctx, &pb.GenerateRequest{
		Sampling: kvfork.Greedy(), Stopping: length(g.MaxTokens),
	}).Result()
	if err != nil {
		return nil, err
	}
	prompt := int(generation.Started().PromptTokens)
	return seen{
		"marks": len(result.Marks), "first_is_prompt_end": result.Marks[0].TokenCount() == prompt,
		"second_tokens":              result.Marks[1].TokenCount(),
		"saved_is_prompt_and_answer": result.Snapshot.TokenCount() == prompt+int(result.Usage().CompletionTokens),
		"same_text_from_prompt_end":  again.Text == result.Text,
		"recomputed_tokens":          again.Usage().RecomputedTokens,
	}, nil
}

func fork(ctx context.Context, c *kvfork.Client, g given) (seen, error) {
	source, err := c.CreateSnapshot(ctx, &pb.CreateSnapshotRequest{Input: kvfork.Text(g.Prompt)})
	if err != nil {
		return nil, err
	}
	var branches []*pb.ForkBranch
	for _, text := range g.Appends {
		branches = append(branches, kvfork.Append(kvfork.Text(text)))
	}
	children, err := source.ForkInto(ctx, branches...)
	if err != nil {
		return nil, err
	}
	results := make([]*kvfork.Result, len(children))
	var all sync.WaitGroup
	for index, child := range children {
		all.Go(func() {
			results[index], _ = child.Generate(ctx, &pb.GenerateRequest{
				Sampling: kvfork.Greedy(), Stopping: length(g.MaxTokens),
			}).Result()
		})
	}
	all.Wait()
	copies, err := source.Fork(ctx, 2)
	if err != nil {
		return nil, err
	}
	own, err := source.Tokens(ctx)
	if err != nil {
		return nil, err
	}
	observed := map[string]bool{}
	parents, receipts, same := true, addsUp(children[0].Usage), true
	finished, completion := 0, uint32(0)
	for index, child := range children {
		observed[child.Name()] = true
		parents = parents && child.Info.Parent == source.Name()
		if results[index] != nil {
			finished++
			completion += results[index].Usage().CompletionTokens
			receipts = receipts && addsUp(results[index].Usage())
		}
	}
	for _, copied := range copies {
		tokens, err := copied.Tokens(ctx)
		same = same && err == nil && slices.Equal(tokens, own)
	}
	return seen{
		"children": len(children), "distinct_names": len(observed), "parents_are_the_source": parents,
		"finished": finished, "completion_tokens": completion, "receipts_add_up": receipts,
		"plain_copies": len(copies), "copies_have_its_tokens": same,
	}, nil
}

func rollbackExact(ctx context.Context, c *kvfork.Client, g given) (seen, error) {
	request := ask(g, strings.Repeat(g.Prompt, g.Times))
	request.Marks = []*pb.Mark{kvfork.PromptEnd()}
	request.Save = &pb.SnapshotOptions{}
	result, err := c.Generate(ctx, request).Result()
	if err != nil {
		return nil, err
	}
	end, prompt := result.Snapshot, result.Marks[0]
	cut, err := end.Rollback(ctx, kvfork.ToTokens(prompt.TokenCount()))
	if err != nil {
		return nil, err
	}
	again, err := cut.Generate(ctx, &pb.GenerateRequest{
		Sampling: kvfork.Greedy(), Stopping: length(g.MaxTokens),
	}).Result()
	if err != nil {
		return nil, err
	}
	dropped, err := end.Rollback(ctx, kvfork.DropTokens(3))
	if err != nil {
		return nil, err
	}
	ancestor, err := end.Rollback(ctx, kvfork.ToAncestor(prompt.Name()))
	if err != nil {
		return nil, err
	}
	_, beyond := end.Rollback(ctx, kvfork.ToTokens(end.TokenCount()+1))
	last, err := dropped.Rollback(ctx, kvfork.DropTokens(1), kvfork.Release(pb.Release_RELEASE_SOURCE))
	if err != nil {
		return nil, err
	}
	over := told(beyond)
	over["told_token_count"] = kvfork.AsError(beyond).Metadata["tokenCount"] == fmt.Sprint(end.TokenCount())
	return seen{
		"cut_at_prompt": cut.TokenCount() == prompt.TokenCount(), "same_text_again": again.Text == result.Text,
		"dropped_three":   dropped.TokenCount() == end.TokenCount()-3,
		"to_ancestor":     ancestor.TokenCount() == prompt.TokenCount(),
		"released_source": slices.Equal(last.Released, []string{dropped.Name()}),
		"beyond_end":      over,
	}, nil
}

func rollbackDown(ctx context.Context, c *kvfork.Client, g given) (seen, error) {
	input := kvfork.Text(strings.Repeat(g.Prompt, g.Times))
	source, err := c.CreateSnapshot(ctx, &pb.CreateSnapshotRequest{Input: input})
	if err != nil {
		return nil, err
	}
	back, err := source.Rollback(ctx, kvfork.ToTokens(g.CutAt), kvfork.RoundDown())
	if err != nil {
		return nil, err
	}
	return seen{
		"token_count": back.TokenCount(), "recomputed_tokens": back.Usage.RecomputedTokens,
		"new_tokens": back.Usage.NewTokens,
	}, nil
}

func failures(ctx context.Context, c *kvfork.Client, g given) (seen, error) {
	_, fields := c.Generate(ctx, &pb.GenerateRequest{
		Input:    kvfork.Text("Hi"),
		Sampling: &pb.Sampling{Temperature: proto.Float32(-1), TopP: proto.Float32(2)},
	}).Result()
	_, snapshot := c.GetSnapshot(ctx, g.Missing)
	_, model := c.Model(ctx, g.Model)
	_, long := c.Generate(ctx, &pb.GenerateRequest{Input: kvfork.Text(strings.Repeat("word ", g.TooManyWords))}).Result()
	wrong := told(fields)
	var paths []string
	for _, field := range kvfork.AsError(fields).Fields {
		paths = append(paths, field.Path)
	}
	slices.Sort(paths)
	wrong["fields"] = paths
	missing, none, tooLong := told(snapshot), told(model), told(long)
	missing["resource"], missing["snapshot_is_gone"] = kvfork.AsError(snapshot).Resource, isGone(snapshot)
	none["resource"], none["snapshot_is_gone"] = kvfork.AsError(model).Resource, isGone(model)
	tooLong["metadata"] = slices.Sorted(maps.Keys(kvfork.AsError(long).Metadata))
	return seen{"fields": wrong, "snapshot": missing, "model": none, "too_long": tooLong}, nil
}

func expired(ctx context.Context, c *kvfork.Client, g given) (seen, error) {
	snapshot, err := c.CreateSnapshot(ctx, &pb.CreateSnapshotRequest{
		Input:   kvfork.Text(g.Prompt),
		Options: &pb.SnapshotOptions{Ttl: &durationpb.Duration{Seconds: g.TTLSeconds}},
	})
	if err != nil {
		return nil, err
	}
	time.Sleep(seconds(g.WaitSeconds))
	events := 0
	for _, err = range snapshot.Generate(ctx, &pb.GenerateRequest{Stopping: length(4)}).Events() {
		if err == nil {
			events++
		}
	}
	observed := told(err)
	_, observed["told_expire_time"] = kvfork.AsError(err).Metadata["expireTime"]
	observed["events_before"], observed["handle_knows"] = events, snapshot.Gone() != nil
	return observed, nil
}

func stop(ctx context.Context, c *kvfork.Client, g given) (seen, error) {
	request := ask(g, g.Prompt)
	request.Save = &pb.SnapshotOptions{}
	generation := c.Generate(ctx, request)
	if _, err := firstDeltas(generation, g.AfterDeltas); err != nil {
		return nil, err
	}
	running, err := generation.Stop(ctx)
	if err != nil {
		return nil, err
	}
	result, err := generation.Result()
	if err != nil {
		return nil, err
	}
	later, err := c.Stop(ctx, generation.Started().Generation)
	total := generation.Started().PromptTokens + result.Usage().CompletionTokens
	return seen{
		"was_running": running, "reason": reason(result.Finished),
		"snapshot_holds_all": result.Snapshot.TokenCount() == int(total),
		"receipt_adds_up":    addsUp(result.Usage()), "was_running_later": later,
	}, err
}

func cancelPrefill(ctx context.Context, c *kvfork.Client, g given) (seen, error) {
	request := ask(g, strings.Repeat(g.Prompt, g.Times))
	request.Output = &pb.OutputOptions{Progress: true}
	generation := c.Generate(ctx, request)
	deltas := 0
	for event, err := range generation.Events() {
		if err != nil {
			return nil, err
		}
		if progress := event.GetProgress(); progress != nil && progress.DoneTokens < progress.TotalTokens {
			break // leaving the loop cancels
		}
		if event.GetDelta() != nil {
			deltas++
		}
	}
	_, err := generation.Result()
	return seen{"code": code(err), "deltas": deltas}, nil
}

func cancelDecode(ctx context.Context, c *kvfork.Client, g given) (seen, error) {
	generation := c.Generate(ctx, ask(g, g.Prompt))
	deltas, err := firstDeltas(generation, g.AfterDeltas)
	if err != nil {
		return nil, err
	}
	generation.Cancel()
	_, err = generation.Result()
	return seen{"code": code(err), "deltas": len(deltas)}, nil
}

func deadline(ctx context.Context, c *kvfork.Client, g given) (seen, error) {
	ctx, cancel := context.WithTimeout(ctx, seconds(g.TimeoutSeconds))
	defer cancel()
	deltas := 0
	var last error
	for _, err := range c.Generate(ctx, ask(g, g.Prompt)).Deltas() {
		if last = err; err == nil {
			deltas++
		}
	}
	return seen{"code": code(last), "some_deltas": deltas > 0}, nil
}

func saveOnCancel(ctx context.Context, c *kvfork.Client, g given) (seen, error) {
	request := ask(g, g.Prompt)
	request.Save = &pb.SnapshotOptions{SnapshotId: g.SnapshotID}
	request.SaveOnCancel = true
	generation := c.Generate(ctx, request)
	if _, err := firstDeltas(generation, g.AfterDeltas); err != nil {
		return nil, err
	}
	generation.Cancel()
	_, ended := generation.Result()
	var kept *kvfork.Snapshot
	for kept == nil { // it is there a moment after the call has ended
		found, err := c.GetSnapshot(ctx, "snapshots/"+g.SnapshotID)
		if err != nil && !isGone(err) {
			return nil, err
		}
		if kept = found; kept == nil {
			time.Sleep(50 * time.Millisecond)
		}
	}
	more, err := kept.Generate(ctx, &pb.GenerateRequest{Stopping: length(2)}).Result()
	if err != nil {
		return nil, err
	}
	return seen{
		"code": code(ended), "longer_than_prompt": kept.TokenCount() > int(generation.Started().PromptTokens),
		"goes_on": more.Usage().CompletionTokens == 2,
	}, nil
}

func abandoned(ctx context.Context, c *kvfork.Client, g given) (seen, error) {
	if _, err := firstDeltas(c.Generate(ctx, ask(g, g.Prompt)), 1); err != nil {
		return nil, err
	}
	runtime.GC()
	return seen{"dropped": true}, nil
}

func slowReader(ctx context.Context, c *kvfork.Client, g given) (seen, error) {
	generation := c.Generate(ctx, ask(g, g.Prompt))
	deltas, err := firstDeltas(generation, 1)
	if err != nil {
		return nil, err
	}
	time.Sleep(seconds(g.PauseSeconds))
	for delta, err := range generation.Deltas() {
		if err != nil {
			return nil, err
		}
		deltas = append(deltas, delta)
	}
	result, err := generation.Result()
	if err != nil {
		return nil, err
	}
	tokens := uint32(0)
	for _, delta := range deltas {
		tokens += delta.TokenCount
	}
	return seen{
		"text": result.Text, "tokens_in_deltas": tokens, "completion_tokens": result.Usage().CompletionTokens,
		"positions_join": join(deltas, generation.Started().PromptTokens),
	}, nil
}

func bigMessage(ctx context.Context, c *kvfork.Client, g given) (seen, error) {
	text := strings.Repeat(g.Word, g.Words)
	counted, err := c.CountTokens(ctx, &pb.CountTokensRequest{Input: kvfork.Text(text), IncludeRendered: true})
	if err != nil {
		return nil, err
	}
	input := kvfork.Text(strings.Repeat(g.Word, g.TooManyWords))
	_, over := c.CountTokens(ctx, &pb.CountTokensRequest{Input: input})
	return seen{
		"text_came_back": strings.HasSuffix(counted.Text, text), "reply_over_4_mib": len(counted.Text) > 4<<20,
		"over_limit": told(over),
	}, nil
}

func image(ctx context.Context, _ *kvfork.Client, g given) (seen, error) {
	c, err := kvfork.Dial(g.Peer)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	words := kvfork.TextPart(g.WordsBefore)
	kept, err := c.CreateSnapshot(ctx, &pb.CreateSnapshotRequest{Input: kvfork.Raw(words, kvfork.ImagePart(g.PNG))})
	if err != nil {
		return nil, err
	}
	digest := sha256.Sum256(g.PNG)
	known := &pb.Part{Kind: &pb.Part_Image{Image: &pb.Image{Source: &pb.Image_Sha256{Sha256: digest[:]}}}}
	again, err := c.CountTokens(ctx, &pb.CountTokensRequest{Input: kvfork.Raw(words, known)})
	if err != nil {
		return nil, err
	}
	result, err := kept.Generate(ctx, ask(g, g.Question)).Result()
	if err != nil {
		return nil, err
	}
	_, no := c.CreateSnapshot(ctx, &pb.CreateSnapshotRequest{Input: kvfork.Raw(kvfork.ImagePart([]byte("no picture")))})
	return seen{
		"spans": len(kept.Info.ImageSpans), "image_tokens_counted": kept.Usage.ImageTokens > 0,
		"known_by_digest":   int(again.TotalTokens) == kept.TokenCount(),
		"recomputed_tokens": result.Usage().RecomputedTokens, "completion_tokens": result.Usage().CompletionTokens,
		"no_picture": told(no),
	}, nil
}

func retry(ctx context.Context, _ *kvfork.Client, g given) (seen, error) {
	c, err := kvfork.Dial(g.Peer)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	request := &pb.GenerateRequest{Input: kvfork.Text(g.Prompt)}
	before, err := c.Generate(ctx, request).Result()
	if err != nil {
		return nil, err
	}
	events := 0
	var after error
	for _, err := range c.Generate(ctx, request).Events() {
		if after = err; err == nil {
			events++
		}
	}
	_, no := c.Generate(ctx, request).Result()
	made, err := c.Snapshot("snapshots/source").Fork(ctx, 2)
	if err != nil {
		return nil, err
	}
	return seen{
		"before_started": before.Text, "after_started": seen{"code": code(after), "events": events},
		"told_not_to": told(no), "fork": len(made),
	}, nil
}

func socket(ctx context.Context, c *kvfork.Client, g given) (seen, error) {
	other, err := kvfork.Dial(g.Socket, kvfork.WithToken(g.Token))
	if err != nil {
		return nil, err
	}
	defer other.Close()
	there, err := other.ServerInfo(ctx)
	if err != nil {
		return nil, err
	}
	here, err := c.ServerInfo(ctx)
	return seen{"same_instance": here.GetInstance() == there.Instance}, err
}

func secured(ctx context.Context, _ *kvfork.Client, g given) (seen, error) {
	pem, err := os.ReadFile(g.CA)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	info := func(options ...kvfork.DialOption) (*pb.GetServerInfoResponse, error) {
		c, err := kvfork.Dial(g.Peer, options...)
		if err != nil {
			return nil, err
		}
		defer c.Close()
		return c.ServerInfo(ctx)
	}
	trusting := kvfork.WithTLS(&tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12})
	with, err := info(trusting, kvfork.WithToken(g.Token))
	if err != nil {
		return nil, err
	}
	_, without := info(trusting)
	_, unknown := info(trusting, kvfork.WithToken(g.UnknownToken))
	_, other := info(kvfork.WithTLS(nil), kvfork.WithoutRetry())
	_, refused := kvfork.Dial("example.org:443", kvfork.WithToken(g.Token))
	return seen{
		"with_token": with.Instance != "", "without_token": told(without), "unknown_token": told(unknown),
		"other_roots":            code(other),
		"token_in_clear_refused": refused != nil,
	}, nil
}

func drain(ctx context.Context, c *kvfork.Client, g given) (seen, error) {
	request := ask(g, g.Prompt)
	request.Save = &pb.SnapshotOptions{}
	generation := c.Generate(ctx, request)
	if _, err := firstDeltas(generation, 1); err != nil {
		return nil, err
	}
	impatient, err := kvfork.Dial(g.Address, kvfork.WithoutRetry())
	if err != nil {
		return nil, err
	}
	defer impatient.Close()
	for draining := false; !draining; time.Sleep(20 * time.Millisecond) {
		info, err := impatient.ServerInfo(ctx)
		if err != nil {
			return nil, err
		}
		draining = info.Draining
	}
	_, refused := impatient.Generate(ctx, &pb.GenerateRequest{Input: kvfork.Text(g.Prompt)}).Result()
	result, err := generation.Result()
	if err != nil {
		return nil, err
	}
	return seen{
		"new_call": told(refused), "running_ended": reason(result.Finished), "snapshot_made": result.Snapshot != nil,
	}, nil
}

func main() {
	client, err := kvfork.Dial(os.Args[1])
	if err != nil {
		panic(err)
	}
	defer client.Close()
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var asked struct {
			Scenario string
			Given    given
		}
		if err := json.Unmarshal(lines.Bytes(), &asked); err != nil {
			panic(err)
		}
		line := seen{"scenario": asked.Scenario}
		if play, ok := plays[asked.Scenario]; !ok {
			line["error"] = "this driver does not know the scenario"
		} else if observed, err := play(context.Background(), client, asked.Given); err != nil {
			line["error"] = err.Error()
		} else {
			line["observed"] = observed
		}
		if err := json.NewEncoder(os.Stdout).Encode(line); err != nil {
			panic(err)
		}
	}
}

func isGone(err error) bool { return errors.Is(err, kvfork.ErrGone) }
