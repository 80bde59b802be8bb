// Renders a chart as `helm template` does, where there is no helm: Go's templates, sprig, and what Helm adds to them.
//
//	render_chart [-values FILE | -set KEY=VALUE]... [-notes] RELEASE CHART
//
// Values are merged in this order, and validated as Helm does it. Not known here are lists and escapes in -set, and
// functions that the chart does not use. With -notes it prints the notes alone.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"github.com/xeipuuv/gojsonschema"
	"sigs.k8s.io/yaml"
)

type values = map[string]interface{}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

func read(path string) values {
	text, err := os.ReadFile(path)
	check(err)
	found := values{}
	check(yaml.Unmarshal(text, &found))
	return found
}

// merge lets what is told win; a null removes what the chart has.
func merge(chart, told values) values {
	for key, value := range told {
		ours, both := chart[key].(values)
		theirs, maps := value.(values)
		switch {
		case value == nil:
			delete(chart, key)
		case both && maps:
			chart[key] = merge(ours, theirs)
		default:
			chart[key] = value
		}
	}
	return chart
}

func parse(word string) values {
	path, text, found := strings.Cut(word, "=")
	if !found || strings.ContainsAny(word, `{}[]\,`) {
		check(fmt.Errorf("-set %s: KEY=VALUE alone is known here", word))
	}
	var value interface{} = text
	if number, err := strconv.ParseInt(text, 10, 64); err == nil && (text == "0" || text[0] != '0') {
		value = number
	} else if plain, known := map[string]interface{}{"true": true, "false": false, "null": nil}[text]; known {
		value = plain
	}
	keys := strings.Split(path, ".")
	for n := len(keys) - 1; n >= 0; n-- {
		value = values{keys[n]: value}
	}
	return value.(values)
}

func validate(schema string, all values) {
	text, err := os.ReadFile(schema)
	check(err)
	result, err := gojsonschema.Validate(gojsonschema.NewBytesLoader(text), gojsonschema.NewGoLoader(all))
	check(err)
	if !result.Valid() {
		check(fmt.Errorf("values don't meet the specifications of the schema: %v", result.Errors()))
	}
}

func functions(all *template.Template) template.FuncMap {
	known := sprig.TxtFuncMap()
	delete(known, "env")
	delete(known, "expandenv")
	known["toYaml"] = func(value interface{}) string {
		text, err := yaml.Marshal(value)
		check(err)
		return strings.TrimSuffix(string(text), "\n")
	}
	known["include"] = func(name string, data interface{}) (string, error) {
		var text strings.Builder
		err := all.ExecuteTemplate(&text, name, data)
		return text.String(), err
	}
	return known
}

func main() {
	var told []func() values
	flag.Func("values", "a file of values", func(path string) error {
		told = append(told, func() values { return read(path) })
		return nil
	})
	flag.Func("set", "a value", func(word string) error {
		told = append(told, func() values { return parse(word) })
		return nil
	})
	notes := flag.Bool("notes", false, "the notes alone")
	flag.Parse()
	release, chart := flag.Arg(0), flag.Arg(1)

	meta := read(filepath.Join(chart, "Chart.yaml"))
	about := values{"Name": meta["name"], "Version": meta["version"], "AppVersion": meta["appVersion"]}
	all := read(filepath.Join(chart, "values.yaml"))
	for _, one := range told {
		all = merge(all, one())
	}
	validate(filepath.Join(chart, "values.schema.json"), all)
	data := values{"Values": all, "Chart": about, "Release": values{"Name": release, "Namespace": "default", "Service": "Helm"}}

	templates := template.New("chart").Option("missingkey=zero")
	templates.Funcs(functions(templates))
	paths, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	check(err)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		check(err)
		template.Must(templates.New(filepath.Base(path)).Parse(string(text)))
	}
	for _, path := range paths {
		name := filepath.Base(path)
		var text strings.Builder
		if !strings.HasPrefix(name, "_") {
			check(templates.ExecuteTemplate(&text, name, data))
		}
		whole := strings.TrimSpace(strings.ReplaceAll(text.String(), "<no value>", ""))
		if (name == "NOTES.txt") != *notes || whole == "" {
			continue
		}
		if !*notes {
			fmt.Printf("---\n# Source: %s/templates/%s\n", about["Name"], name)
		}
		fmt.Println(whole)
	}
}
