// Command kstatus prints what kstatus, the library by which Flux and Helm wait, computes for the objects on its standard
// input: one JSON object after the other, one line of status, tab and message for each.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func main() {
	objects := json.NewDecoder(os.Stdin)
	for {
		var object unstructured.Unstructured
		err := objects.Decode(&object)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			log.Fatal(err)
		}
		result, err := status.Compute(&object)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s\t%s\n", result.Status, result.Message)
	}
}
