"""What the pipeline consists of: sales come in, those that count are looked at, takings add up."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()
CLUSTER = {"bootstrap.servers": spark.conf.get("shop.bootstrap")}


@dp.temporary_view
def paid_sales() -> DataFrame:
    """The stream of sales, without those that nobody paid for."""
    sales = spark.readStream.format("fluss").options(**CLUSTER).load("example_shop.sales")
    return sales.where("cents > 0")


dp.create_sink("takings", format="fluss", options={**CLUSTER, "table": "example_shop.takings"})


@dp.append_flow(target="takings")
def add_up() -> DataFrame:
    """What each shop takes, added up by an aggregation table."""
    return spark.readStream.table("paid_sales").selectExpr("shop", "1L AS sales", "cents")
