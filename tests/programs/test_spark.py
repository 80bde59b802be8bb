"""Spark on one machine: a Java program that the kernel talks to, and that has workers of its own."""

from __future__ import annotations

from copies import forking
from notebooks import Notebook

SESSION = """
import os, sys
os.environ["PYSPARK_PYTHON"] = sys.executable  # its workers would be the first Python on the PATH
from pyspark.sql import SparkSession, functions
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "true").getOrCreate()
numbers = spark.range(10_000).withColumn("square", functions.col("id") * functions.col("id")).cache()
counted = numbers.count()
shout = functions.udf(str.upper)
def answers():
    cached = spark.sparkContext._jsc.sc().getRDDStorageInfo()[0].numCachedPartitions()
    return numbers.agg(functions.sum("square")).first()[0], cached
def by_workers():
    letters = spark.createDataFrame([("a",), ("b",)], ["letter"])
    return [row[0] for row in letters.select(shout("letter")).collect()]
before = answers(), by_workers()
application = spark.sparkContext.applicationId
"""


def test_a_cached_frame_answers_and_functions_run_in_its_workers(notebook: Notebook) -> None:
    notebook.run(SESSION, timeout=240)
    notebook.run("%gpuckpt save here", timeout=120)
    check = "(answers(), by_workers()) == before, before, spark.sparkContext.applicationId == application"
    expected = "True ((333283335000, 2), ['A', 'B']) True"
    for _ in range(2):
        assert "TCP" not in notebook.run("%gpuckpt restore here", timeout=120).text
        assert notebook.value(check) == expected
    with forking() as fork:
        (copy,) = fork(notebook)
        assert copy.value("answers() == before[0]") == "True"
        assert notebook.value(check) == expected
    notebook.run("spark.stop()")
