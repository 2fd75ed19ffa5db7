// Kubernetes in one binary: the API server, the controller manager, the scheduler, the kubelet, kube-proxy and kubectl.
//
// It is called by a component's name (a link of that name), or with the name as the first argument.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	_ "time/tzdata" // CronJobs name time zones

	"github.com/spf13/cobra"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var servers = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kube-proxy":              proxy.NewProxyCommand,
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

func known(name string) bool {
	return name == "kubectl" || servers[name] != nil
}

func main() {
	name := filepath.Base(os.Args[0])
	if !known(name) && len(os.Args) > 1 {
		name = os.Args[1]
		os.Args = os.Args[1:]
	}
	switch {
	case name == "kubectl":
		runKubectl()
	case known(name):
		os.Exit(cli.Run(servers[name]()))
	default:
		fmt.Fprintln(os.Stderr, "usage: kubernetes "+
			"kube-apiserver|kube-controller-manager|kube-scheduler|kubelet|kube-proxy|kubectl [ARGUMENT]...")
		os.Exit(2)
	}
}

func runKubectl() {
	// Building the command logs already, before the flags are parsed: look for the verbosity by hand.
	logs.GlogSetter(kubectl.GetLogVerbosity(os.Args)) //nolint:errcheck // a wrong value is told when flags are parsed
	if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
		util.CheckErr(err)
	}
}
